"""Measurement: load tests of servers, and interleaved latency of models in this process, with confidence intervals."""
