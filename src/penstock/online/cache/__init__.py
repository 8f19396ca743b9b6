"""The response cache, with single flight and Redis as a second tier."""
