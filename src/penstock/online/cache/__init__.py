"""The response cache, single flight, and Redis as a second tier."""
