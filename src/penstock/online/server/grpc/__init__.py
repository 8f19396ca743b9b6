"""gRPC: the services and the codec; the transport is HTTP/2, in `h2`."""
