from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidConfig, InvalidInput, PermissionDenied
from penstock.pipeline.direct import Direct
from penstock.pipeline.python_step import read_python_step
from penstock.pipeline.value import FILE, TEXT, Media, ValueType
from penstock.tensor import DataType
from pipelines import FEATURES, LOCAL, function

CODE = b"""
from typing import Annotated
import numpy as np
from penstock import Tensor

print("the file has run")

def grade(p: Tensor["FP32", 2], note: str = "") -> str:
    return "good" if p[0] > 0.5 else "bad"

def both(a: "Annotated[np.ndarray, Tensor('INT64', -1)]", f: bytes, names: list[str]) -> tuple[str, Tensor["FP32"]]:
    return "x", np.float32(1)

def fails(p: str) -> str:
    raise KeyError("gone")

def plain(p) -> str:
    return p

def odd(p: dict) -> str:
    return p

def leaves(p: str) -> str:
    raise SystemExit(3)

def changes(a: Tensor["FP32", 2], some: list[Tensor["FP32", 2]]) -> str:
    some.clear()
    a[0] = 5
    return ""

def short(p: str) -> tuple[str, str]:
    return ("one",)
"""
FILES = {"my.py": CODE}


def test_type_hints_declare_the_values(capsys: pytest.CaptureFixture[str]) -> None:
    step = read_python_step("my.py:both", FILES)
    numbers = ValueType(Media.TENSOR, DataType.INT64, (-1,))
    texts = ValueType(Media.TEXT, DataType.BYTES, many=True)
    assert step.inputs == {"a": numbers, "f": FILE, "names": texts}
    assert step.outputs == {"0": TEXT, "1": ValueType(Media.TENSOR, DataType.FP32)}
    assert capsys.readouterr().out == ""


def test_code_runs_only_with_permission(capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[Any] = [
        {"model": "linear", "in": "features", "out": "logits"},
        {"step": "softmax", "in": "logits", "out": "p"},
        {"step": "constant", "value": "a note", "out": "note"},
        {"python": "my.py:grade", "in": {"p": "p", "note": "note"}, "out": "grade"},
    ]
    given: dict[str, Any] = {"steps": steps, "outputs": ["grade", "p"], "labels": None, "files": FILES}
    with pytest.raises(PermissionDenied, match="runs Python code, my.py"):
        Direct(function(**given), LOCAL).call({"features": FEATURES})
    assert capsys.readouterr().out == ""
    assert Direct(function(allow_python=True, **given), LOCAL).call({"features": FEATURES})["grade"] in ("good", "bad")
    steps[3]["in"] = {"p": "note", "note": "note"}
    with pytest.raises(InvalidConfig, match=r"parameter 'p' is tensor FP32 \[2\], but the value is text"):
        function(**given)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my.py", "is not a function in a file"),
        ("my.txt:f", "is not a function in a file"),
        ("none.py:f", "there is no file 'none.py'"),
        ("my.py:grad", r"no function 'grad' \(did you mean 'grade'"),
        ("my.py:plain", "parameter 'p' of 'plain' needs a type hint"),
        ("my.py:odd", "needs a type hint: .* not dict"),
        ("bad.py:f", "bad.py is not valid Python"),
        ("deep.py:f", "deep.py is not valid Python"),
        ("hint.py:f", "the type hint of parameter 'x' of 'f' is wrong"),
        ("text.py:f", "the type hint of parameter 'x' of 'f' is not valid Python"),
        ("star.py:f", "named parameters only"),
    ],
)
def test_mistakes(target: str, message: str) -> None:
    files = {
        **FILES,
        "bad.py": b"def f(:",
        "deep.py": b"(" * 100_000,
        "hint.py": b"def f(x: Tensor['FP33', 2]) -> str: ...",
        "text.py": b"def f(x: '1 +') -> str: ...",
        "star.py": b"def f(*x: str) -> str: ...",
    }
    with pytest.raises(InvalidConfig, match=message):
        read_python_step(target, files)


def test_errors_of_the_function_are_those_of_the_item() -> None:
    step = read_python_step("my.py:fails", FILES, is_allowed=True)
    with pytest.raises(InvalidInput, match="'fails' of my.py failed: KeyError: 'gone'"):
        step.run({"p": "x"})
    with pytest.raises(InvalidInput, match="must return 2 values"):
        read_python_step("my.py:short", FILES, is_allowed=True).run({"p": "x"})
    step = read_python_step("broken.py:f", {"broken.py": b"1 / 0\ndef f(p: str) -> str: ..."}, is_allowed=True)
    with pytest.raises(InvalidConfig, match="broken.py cannot be run: ZeroDivisionError"):
        step.run({"p": "x"})


def test_steps_return_what_the_function_returns() -> None:
    step = read_python_step("my.py:both", FILES, is_allowed=True)
    assert step.run({"a": np.arange(2), "f": b"", "names": []}) == {"0": "x", "1": np.float32(1)}


def test_exit_of_the_function_is_an_error_of_the_item() -> None:
    with pytest.raises(InvalidInput, match="'leaves' of my.py failed: SystemExit: 3"):
        read_python_step("my.py:leaves", FILES, is_allowed=True).run({"p": "x"})


def test_the_function_cannot_change_values_that_other_steps_read() -> None:
    numbers, some = np.zeros(2, np.float32), [np.zeros(2, np.float32)]
    with pytest.raises(InvalidInput, match="read-only"):
        read_python_step("my.py:changes", FILES, is_allowed=True).run({"a": numbers, "some": some})
    assert not numbers.any()
    assert len(some) == 1
    assert numbers.flags.writeable


def returning(hint: str, value: str) -> Any:
    """The result of a function with the type ``hint`` that returns ``value``."""
    code = f"import numpy as np\nfrom penstock import Tensor\ndef f() -> {hint}:\n    return {value}".encode()
    return read_python_step("f.py:f", {"f.py": code}, is_allowed=True).run({})["value"]


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        ("str", "5"),
        ("str", "None"),
        ("str", "b'x'"),
        ("str", "'\\ud800'"),
        ("bytes", "'x'"),
        ("list[str]", "'ab'"),
        ("list[str]", "iter(['a'])"),
        ("list[str]", "['a', 1]"),
        ("list[Tensor['FP32', 2]]", "[np.zeros(3, np.float32)]"),
        ("Tensor['FP32', 3]", "np.zeros(4, np.float32)"),
        ("Tensor['FP32', 3]", "np.zeros((1, 3), np.float32)"),
        ("Tensor['FP32', 3]", "np.zeros(3)"),
        ("Tensor['FP32', 3]", "[1, 2, 3]"),
        ("Tensor['INT32']", "1 << 40"),
        ("Tensor['BYTES', 1]", "np.array([None])"),
        ("Tensor['BYTES', 1]", "np.array(['\\ud800'], object)"),
    ],
)
def test_results_must_be_of_the_declared_type(hint: str, value: str) -> None:
    with pytest.raises(InvalidInput, match="^the result of 'f' of f.py (is|has) "):
        returning(hint, value)


def test_results_of_the_declared_type_are_returned() -> None:
    assert returning("list[str]", "('a', 'b')") == ["a", "b"]
    assert returning("bytes", "b''") == b""
    assert returning("Tensor['FP32', -1]", "np.zeros(0, np.float32)").shape == (0,)
    assert returning("Tensor['BYTES', 2]", "np.array(['a', b'b'], object)").tolist() == ["a", b"b"]
    number = returning("Tensor['FP32']", "0.5")
    assert (number.dtype, number.shape, number.item()) == (np.float32, (), 0.5)
