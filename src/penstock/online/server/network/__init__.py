"""Sockets: listening, protocol detection, TLS, and the open connections."""
