"""One scenario per file: its docstring says what is compared, ``run(quick)`` returns the rows.

One that has parts names them in ``PARTS``.
"""

SCENARIOS = (
    "digits", "serving", "repository", "server_path", "goodput", "telemetry_cost", "int8", "compress", "startup", "hostile",
)  # fmt: skip
"""In the order of ``RESULTS.md``."""
