"""The commands of the compression methods, made from their table."""
