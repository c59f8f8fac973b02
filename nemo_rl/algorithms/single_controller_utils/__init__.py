"""What stands around the single controller: its config, its set-up, the stages beside it."""
