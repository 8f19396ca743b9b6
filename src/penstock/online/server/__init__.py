"""The server: transports, their codec, the data plane, and the composition root ``app.py``."""
