"""Online: serves bundles. A request's way is told in ``server/dataplane.py``, read top to bottom."""
