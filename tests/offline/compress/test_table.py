"""The table of methods: every entry loads, and is documented."""

from __future__ import annotations

import msgspec
import pytest

from penstock.config import field_docs
from penstock.offline.compress.method import Method
from penstock.offline.compress.options import usages
from penstock.offline.compress.table import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_every_entry_loads_and_every_option_has_help(name: str) -> None:
    entry = METHODS[name]
    method = entry.load()
    assert issubclass(method, Method)
    assert method.__doc__
    assert method.examples
    assert all(line.startswith(f"penstock {name} ") for line in method.examples)
    docs = field_docs(method)
    fields = [field.name for field in msgspec.structs.fields(method)]
    assert [name for name in fields if not docs[name].endswith(".")] == []
    known = {other for usage in usages(method).values() for other in (*usage.needs, *usage.excludes)}
    assert known <= set(fields)


@pytest.mark.parametrize("name", [name for name, entry in METHODS.items() if entry.steps])
def test_the_options_of_planned_steps_are_allowed(name: str) -> None:
    method = METHODS[name].load()
    common = {"epochs": 5.0, "seed": 1, "threads": 1}
    for step in METHODS[name].steps:
        method.make(
            {**{key: value for key, value in common.items() if key in method.__struct_fields__}, **step.options}
        )
