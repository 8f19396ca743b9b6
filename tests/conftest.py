"""Settings for every test."""

from __future__ import annotations

from hypothesis import settings

# No wall clock decides a test, and the same examples are drawn on every machine.
settings.register_profile("penstock", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("penstock")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: compressed data may contain the time, and all worker processes must collect the same names."""
    return argname if isinstance(val, bytes) else None
