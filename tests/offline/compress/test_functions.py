"""The methods as functions of ``penstock.compress``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import models
import penstock
from penstock.errors import InvalidArgument, InvalidConfig
from penstock.offline.compress.functions import CompressFunctions
from penstock.offline.compress.table import METHODS

DOCS = Path(__file__).parents[3] / "docs"


def test_type_checkers_know_every_method() -> None:
    assert sorted(CompressFunctions.__annotations__) == dir(penstock.compress)


def test_every_method_is_a_function_with_its_options_and_its_example() -> None:
    assert dir(penstock.compress) == sorted(name.replace("-", "_") for name in METHODS)
    pages = "".join((DOCS / page).read_text() for page in ("compression/methods.md", "reference/cli.md"))
    shown = re.findall(r"penstock\.compress\.(\w+)\(", pages)
    for name in dir(penstock.compress):
        function = getattr(penstock.compress, name)
        parameters = inspect.signature(function).parameters
        assert {"model", "data", "evaluate", "output", "threads"} <= parameters.keys()
        assert "threads: " in function.__doc__
        assert name in shown
    with pytest.raises(AttributeError, match="did you mean 'prune'"):
        penstock.compress.prunes  # noqa: B018


def test_models_and_data_in_memory() -> None:
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    outcome = penstock.compress.prune(models.linear(3, 2), None, {"x": x}, sparsity=0.5, budget_s=0.05)
    assert outcome.model.provenance[-1].facts["sparsity"] == 0.5
    assert outcome.comparison is not None
    assert outcome.comparison.accuracy.metric == "fidelity"
    assert outcome.summary()["made"]["digest"] == outcome.model.digest


def test_a_file_is_written_when_asked_for(tmp_path: Path) -> None:
    outcome = penstock.compress.prune(models.linear(3, 2), output=tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == outcome.model.data


def test_mistakes_name_the_option() -> None:
    model = models.linear(3, 2)
    with pytest.raises(InvalidConfig, match="unknown option 'sparseness'"):
        penstock.compress.prune(model, sparseness=0.5)
    with pytest.raises(InvalidConfig, match="sparsity must be at most 99%, got 120%"):
        penstock.compress.prune(model, sparsity=1.2)
    with pytest.raises(InvalidConfig, match="levels requires iterative"):
        penstock.compress.prune(model, levels=3)
    with pytest.raises(InvalidConfig, match="student is required"):
        penstock.compress.distill(model)
    with pytest.raises(InvalidArgument, match="int8 needs data"):
        penstock.compress.quantize(model)
