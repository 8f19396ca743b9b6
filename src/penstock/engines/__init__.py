"""Engines: runtimes that load and run models, one per file. ``registry.py`` finds them by name."""
