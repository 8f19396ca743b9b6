"""One file per framework, which alone imports it. ``registry.py`` loads these files by name."""
