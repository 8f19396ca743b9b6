"""Our own HTTP/2, the default transport of gRPC."""
