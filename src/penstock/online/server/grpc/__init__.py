"""gRPC: the services, the codec, and the reference transport on ``grpcio``; our own transport is in ``h2``."""
