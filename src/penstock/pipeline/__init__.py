"""Pipelines: steps over named tensors, declared as a checked graph. Each step runs as soon as its inputs are available."""
