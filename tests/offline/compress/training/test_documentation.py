from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.offline.compress.training.operators import OPERATORS

_PAGE = (Path(__file__).parents[4] / "docs" / "compression" / "trainable.md").read_text()


def test_the_page_names_every_operator() -> None:
    section = _PAGE.split("## Operators")[1].split("## Limits")[0]
    named = set(re.findall(r"\b[A-Z]\w+\b", re.sub(r"^\w+: ", "", section, flags=re.MULTILINE)))
    assert named - {"Arithmetic"} == {name for _, name in OPERATORS} | {"Constant"}


def test_the_snippet_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[4] / "examples/digits")
    (snippet,) = re.findall(r"```python\n(.*?)```", _PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(snippet, names)
    assert names["trained"].provenance[-1].name == "fine-tune"  # type: ignore[attr-defined]
