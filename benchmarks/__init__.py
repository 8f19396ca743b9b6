"""Measures the figures that Penstock claims. Run ``python -m benchmarks`` or ``make bench``. See ``RESULTS.md``."""
