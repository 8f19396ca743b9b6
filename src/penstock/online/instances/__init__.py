"""Instances: copies of a model that run batches, on threads or in processes."""
