"""One scenario per file: its docstring says what is compared, ``run(quick)`` returns the rows.

One that has parts names them in ``PARTS``.
"""

SCENARIOS = (
    "digits", "serving", "repository", "server_path", "goodput", "telemetry_cost", "int8", "compress",
    "ladder", "rivals", "startup", "hostile",
)  # fmt: skip
REPORTED = (*SCENARIOS, "soak")
"""The results in ``RESULTS.md``, in its order: ``benchmarks.soak`` adds its own."""
