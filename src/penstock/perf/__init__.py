"""Measurement: load tests of servers, and comparisons of the latency of models in this process, with confidence intervals."""
