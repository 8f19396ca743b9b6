"""Online: serves bundles. ``server/dataplane.py`` shows the path of a request from top to bottom."""
