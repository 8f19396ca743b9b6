"""The messages of the gRPC protocols, from the schema in ``proto/``."""
