"""The compression methods, one per file. ``table.py`` lists them."""
