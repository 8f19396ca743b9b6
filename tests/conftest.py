"""Settings for every test."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from penstock.engines import base
from penstock.resources import CPU_WITHOUT, INTEGER_DOT_PRODUCT, MachineFacts, machine_facts

# No wall clock decides a test, and the same examples are drawn on every machine.
settings.register_profile("penstock", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("penstock")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector the two million objects of imported modules, which live as long as the process.

    The collections during the imports would take a third of their time, and each full collection later about a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: compressed data may contain the time, and all worker processes must collect the same names."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(params=["this CPU", "no integer dot product"])
def any_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MachineFacts]:
    """The machine as it is, then as if its CPU had no integer dot product; child processes believe it too."""
    if request.param == "no integer dot product":
        monkeypatch.setenv(CPU_WITHOUT, INTEGER_DOT_PRODUCT)
    base._this_machine.cache_clear()
    yield machine_facts()
    base._this_machine.cache_clear()
