"""The text that commands print about files."""
