"""Engines: what runs a model. One file each; ``registry.py`` finds them by name."""
