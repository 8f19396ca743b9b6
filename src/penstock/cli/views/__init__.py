"""The text and the tables that commands print."""
