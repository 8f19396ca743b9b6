"""gRPC: the services and the codec. The transport is HTTP/2, in ``h2``."""
