"""The server. ``server/dataplane.py`` shows the path of a request."""
