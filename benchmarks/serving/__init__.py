"""The parts of the scenario ``serving``, one per file. The docstring of a file describes the measurement, and ``run(quick)``
returns the rows.
"""
