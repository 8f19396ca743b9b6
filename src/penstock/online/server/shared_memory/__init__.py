"""Memory that clients share with the server."""
