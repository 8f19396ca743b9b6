"""The cache of answers, single flight, and Redis behind it."""
