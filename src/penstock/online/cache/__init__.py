"""The response cache: equal concurrent requests share one run, and Redis can serve as a second tier."""
