"""Codec of the Open Inference Protocol over HTTP: JSON, optionally followed by raw tensors. No I/O."""
