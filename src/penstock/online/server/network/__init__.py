"""Sockets: listening, telling protocols apart, TLS, and the count of open connections."""
