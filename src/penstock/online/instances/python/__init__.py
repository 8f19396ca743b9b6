"""The Python backend. Each instance runs a ``model.py`` in its own process."""
