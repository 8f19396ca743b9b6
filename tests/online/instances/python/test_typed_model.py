"""Typed models, in real processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import InvalidModel
from python_models import Processes, ask, failure, request


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.end()


SIMPLE = """
import penstock
from penstock import Context, Tensor


@penstock.model
def f(x: Tensor["FP32", -1, 2], context: Context) -> Tensor["FP32", -1]:
    with context.stage("sum"):
        if (x < 0).any():
            raise ValueError("negative")
        return x.sum(axis=1) + len(x) * 100
"""

PLAIN = "import numpy as np\nimport penstock"

CLASS = """
from typing import Annotated, TypedDict
import numpy as np
import penstock
from penstock import Context, Tensor


class Outputs(TypedDict):
    total: Tensor["FP32", -1]
    names: Tensor["BYTES", -1]


@penstock.model
class Sums:
    def load(self, context: Context) -> None:
        self.folder, self.step = context.folder, int(context.parameters.get("step", "1"))

    def forward(self, x: Annotated[np.ndarray, Tensor("FP32", -1, 2)]) -> Outputs:
        return {"names": [str(row[0]) for row in x], "total": x.sum(axis=1) + np.float32(self.step)}

    def unload(self) -> None:
        (self.folder / "unloaded").touch()
"""


def test_a_function_is_served_in_batches(processes: Processes) -> None:
    model = processes.load(SIMPLE, {}, head="")
    assert model.max_batch is None
    assert [spec.name for spec in model.signature.outputs] == ["output"]
    outcomes = ask(model, [request(1), request(2, 3)])
    assert [outcome["output"].tolist() for outcome in outcomes] == [[302], [304, 306]]
    assert model.stages["sum"][0] == model.stages["execute"][0] == 1


def test_one_bad_value_costs_one_answer(processes: Processes) -> None:
    good, bad = ask(processes.load(SIMPLE, {}, head=""), [request(1), request(-1)])
    assert good["output"].tolist() == [102]
    assert bad.message == "the model failed: ValueError: negative"


def test_a_class_loads_and_unloads(processes: Processes, tmp_path: Path) -> None:
    options = {"config": {"parameters": {"step": {"string_value": "5"}}}}
    model = processes.load(CLASS, options, head="")
    assert model.signature.output_names == ["total", "names"]
    first, second = ask(model, [request(1), request(2)])
    assert (first["total"].tolist(), second["names"].tolist()) == ([7], [b"2.0"])
    model.unload()
    assert (tmp_path / "0" / "1" / "unloaded").exists()


MARKED = "from penstock import Tensor, model\n@model\n"

RESULTS = {
    "another shape": ("return x", "shape .* must have"),
    "another dtype": ("return x.sum(axis=1).astype('f8')", "output 'output' has datatype FP64, must have FP32"),
    "too many": ("return x.sum(axis=1), x", "it returned 2 outputs, expected 1"),
    "another name": ("return {'z': x}", r"it returned the outputs \['z'\], expected \['output'\]"),
    "nothing": ("return None", "output 'output' is a NoneType, not an array"),
    "a generator": ("return (row for row in x)", "output 'output' is a generator, not an array"),
    "no rows": ("return x.sum(axis=1)[:0]", r"output 'output' has shape \[0\] for a request with a batch of 1"),
    "several lines": ("raise ValueError('first\\nsecond')", "failed: ValueError: first second$"),
    "a lot": ("raise ValueError('a' * 10000)", "failed: ValueError: a{487}…$"),
    "a name as long": ("return {'a' * 10000: x}", "returned the outputs .{1,500}…$"),
}


def test_wrong_results_of_a_function_are_told(processes: Processes) -> None:
    lines = "\n".join(f"    if x[0, 0] == {n}:\n        {code}" for n, (code, _) in enumerate(RESULTS.values()))
    source = f"""
import penstock
from penstock import Tensor

@penstock.model
def f(x: Tensor["FP32", -1, 2]) -> Tensor["FP32", -1]:
{lines}
"""
    model = processes.load(source, {}, head="")
    for number, (_, message) in enumerate(RESULTS.values()):
        assert re.search(message, failure(model, [request(number)]))


def test_a_model_that_is_not_batched_answers_as_many_rows_as_it_likes(processes: Processes) -> None:
    source = SIMPLE.replace("return x.sum(axis=1)", "return np.zeros(3, 'f4')").replace("import penstock", PLAIN, 1)
    (outcome,) = ask(processes.load(source, {"max_batch": 0}, head=""), [request(1)])
    assert outcome["output"].tolist() == [100] * 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "neither a class 'TritonPythonModel' nor a function or class marked"),
        ("class Model: pass", "write @penstock.model above the model"),
        (MARKED + "class Model: pass", "class 'Model' has no function 'forward'"),
        (MARKED + "class Model:\n    def forward(self, x): pass", "parameter 'x' of 'forward' has no Tensor"),
        (MARKED + 'class Model:\n    def forward(self, x: Tensor["FP32"]): pass', "declares no outputs"),
        ('from penstock import Tensor\nTensor["FP31"]', "a Tensor cannot hold 'FP31'"),
        ('from penstock import Tensor\nTensor["FP32", -2]', r"cannot have the shape \[-2\]"),
        (SIMPLE + "\n@penstock.model\ndef g(): pass", "marks 2 models"),
    ],
)
def test_forms_that_say_too_little_are_refused(processes: Processes, source: str, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        processes.load(source, {}, head="")
