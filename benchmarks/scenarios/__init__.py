"""One scenario per file. The docstring of the file describes the comparison, and ``run(quick)`` returns the rows.

A scenario with parts lists them in ``PARTS``.
"""

SCENARIOS = (
    "digits", "serving", "repository", "server_path", "goodput", "telemetry_cost", "int8", "timing", "compress", "startup", "hostile",
)  # fmt: skip
REPORTED = (*SCENARIOS, "soak")
"""The results in ``RESULTS.md``, in order. ``benchmarks.soak`` also writes a result."""
