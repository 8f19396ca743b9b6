"""The parts of the scenario ``serving``, one file each: its docstring says what is measured, ``run(quick)`` returns the rows."""
