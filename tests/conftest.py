"""Settings for every test."""

from __future__ import annotations

from hypothesis import settings

# No wall clock decides a test, and the same examples are drawn on every machine.
settings.register_profile("penstock", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("penstock")
