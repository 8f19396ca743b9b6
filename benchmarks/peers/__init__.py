"""Other servers of models. Each is configured as its own documentation recommends."""
