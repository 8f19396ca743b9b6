"""Scheduling: requests wait in a queue, leave in batches, and run on instances of the model."""
