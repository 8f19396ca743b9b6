"""Pipelines: steps over named tensors, declared as a graph, checked, and run as soon as their inputs are there."""
