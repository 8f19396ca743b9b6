"""Measurement: load on a server, and interleaved latency of models in this process, with confidence intervals."""
