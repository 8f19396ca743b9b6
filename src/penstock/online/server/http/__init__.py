"""HTTP/1.1: one connection, its requests from bytes to handlers and back, and everything that is offered."""
