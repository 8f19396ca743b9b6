"""Measuring: load against a server, and (interleaved, with confidence) latency of models in this process."""
