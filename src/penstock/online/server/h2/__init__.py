"""HTTP/2, the transport of gRPC."""
