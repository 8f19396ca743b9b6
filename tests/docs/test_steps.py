"""The reference of the standard steps matches their classes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from penstock.config import field_docs
from penstock.pipeline.steps.registry import NAMES, step_class

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "steps.py"))


@pytest.fixture(scope="module")
def page() -> str:
    made: str = SCRIPT["page"]()
    return made


def test_the_page_is_up_to_date(page: str) -> None:
    assert SCRIPT["TARGET"].read_text() == page, "run: python docs/steps.py"


@pytest.mark.parametrize("name", NAMES)
def test_every_step_and_option_is_described(page: str, name: str) -> None:
    step = step_class(name)
    assert step.__doc__
    assert field_docs(step).keys() >= set(step.__struct_fields__)
    assert f"\n### {name}\n" in page
