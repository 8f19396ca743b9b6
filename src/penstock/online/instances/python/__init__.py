"""The Python backend: runs a ``model.py`` in a process per instance."""
