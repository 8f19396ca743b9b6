"""Steps on text."""
