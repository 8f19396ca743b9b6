"""Measurement with confidence intervals: load tests of servers, and latency comparisons of models in this process."""
