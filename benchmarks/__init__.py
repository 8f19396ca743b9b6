"""The figures that Penstock claims, measured: ``python -m benchmarks``, or ``make bench``. See ``RESULTS.md``."""
