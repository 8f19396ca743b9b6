"""One scenario per file: its docstring says what is compared, ``run(quick)`` returns the rows."""

SCENARIOS = ("digits", "server_path", "goodput", "int8", "startup")
"""In the order of ``RESULTS.md``."""
