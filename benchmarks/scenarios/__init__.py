"""One scenario per file. The docstring of the file describes the comparison, and ``run(quick)`` returns the rows.

A scenario with parts lists them in ``PARTS``.
"""

from benchmarks.masked_cpu import CPUS

SCENARIOS = (
    "digits", "serving", "repository", "server_path", "goodput", "telemetry_cost", "int8", "timing",
    "compress", "ladder", "rivals", "packaged", "streamed", "startup", "hostile", "convert", "pipeline",
)  # fmt: skip
REPORTED = (
    *(name for scenario in SCENARIOS for name in (scenario, *(f"{scenario}-{cpu}" for cpu in CPUS))),
    "soak",
)
"""The results in ``RESULTS.md``, in its order: those of this CPU, of masked ones, and of ``benchmarks.soak``."""
