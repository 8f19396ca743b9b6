"""The command line: one file per command. Only the requested command is imported."""
