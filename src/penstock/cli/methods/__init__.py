"""The commands of the compression methods, generated from the table of methods."""
