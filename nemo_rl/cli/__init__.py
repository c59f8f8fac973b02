"""The `onehop` command. Each module holds one subcommand; what is heavy to import is imported inside it."""
