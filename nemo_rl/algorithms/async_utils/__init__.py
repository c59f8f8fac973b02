"""Which samples a step trains on: samplers by staleness, and the buffer they choose from."""
