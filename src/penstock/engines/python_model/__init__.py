"""What runs a ``model.py``, in the process of its own that each instance has."""
