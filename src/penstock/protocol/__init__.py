"""Wire formats shared by the server and the load generator: protobuf messages from ``proto/``, HTTP/2 frames."""
