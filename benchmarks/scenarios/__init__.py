"""One scenario per file: its docstring says what is compared, ``run(quick)`` returns the rows. One with parts has ``PARTS``, by name."""

SCENARIOS = ("digits", "serving", "server_path", "goodput", "telemetry_cost", "int8", "startup")
"""In the order of ``RESULTS.md``."""
