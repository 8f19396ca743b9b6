"""Sequence batching: slots, control tensors, and implicit state."""
