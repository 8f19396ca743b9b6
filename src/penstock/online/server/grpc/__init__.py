"""gRPC, free of any transport of our own: the services, the codec, and the reference transport on ``grpcio``."""
