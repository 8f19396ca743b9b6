"""The compression methods, one a file: options, help and ``run``. ``table.py`` names them."""
