from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest

from penstock.artifact import Artifact, Format
from penstock.engines.base import Severity, check_artifact, declared_signature, run_error, typed_options
from penstock.errors import InvalidConfig, InvalidInput, PenstockError
from penstock.tensor import DataType, Signature, TensorSpec


class Options(msgspec.Struct, frozen=True):
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    hint: Literal["latency", "throughput"] = "latency"


def test_defaults_and_given_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engines.base.usable_cores", lambda: 2)
    assert typed_options("e", {}, Options) == Options()
    assert typed_options("e", {"threads": 2, "hint": "throughput"}, Options) == Options(2, "throughput")


class Wide(msgspec.Struct, frozen=True):
    threads: int = 0
    inter_op_threads: int = 0


def test_threads_are_at_most_the_cores(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A million threads, e.g. in a forged bundle, would keep the engine from ever finishing to load."""
    monkeypatch.setattr("penstock.engines.base.usable_cores", lambda: 3)
    for _ in range(2):
        assert typed_options("e", {"threads": 1_000_000, "inter_op_threads": 4}, Wide) == Wide(3, 3)
        assert typed_options("e", {"threads": 3}, Wide) == Wide(3)
    assert caplog.messages == [
        "'threads' is 1000000, but only 3 are used, the cores that this process may use",
        "'inter_op_threads' is 4, but only 3 are used, the cores that this process may use",
    ]


def test_all_unknown_names_are_told_at_once() -> None:
    with pytest.raises(InvalidConfig) as caught:
        typed_options("e", {"thread": 1, "threads": 1, "arena": True}, Options)
    assert caught.value.message == "unknown option(s) for engine 'e': arena, thread"
    assert caught.value.hint == "use one of: threads, hint"


@pytest.mark.parametrize("options", [{"threads": "2"}, {"threads": -1}, {"threads": True}, {"hint": "speed"}], ids=str)
def test_wrong_value_names_the_engine_and_the_option(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(InvalidConfig, match=rf"bad option for engine 'e': .*{name}"):
        typed_options("e", options, Options)


X = {"name": "x", "datatype": "FP32", "shape": [-1, 3]}


def test_declared_signature() -> None:
    assert declared_signature({"threads": 2, "inputs": []}) is None
    expected = TensorSpec("x", DataType.FP32, (-1, 3))
    assert declared_signature({"inputs": [X], "outputs": (X,)}) == Signature((expected,), (expected,))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs": [X]}, r"declared outputs must have different, non-empty names, got \[\]"),
        ({"inputs": [X, X], "outputs": [X]}, r"declared inputs must have different, non-empty names, got \['x', 'x'\]"),
        ({"inputs": [{**X, "name": ""}], "outputs": [X]}, "declared inputs must have different, non-empty names"),
        ({"inputs": [{**X, "shape": [-2]}], "outputs": [X]}, "a dimension of the declared inputs is below -1"),
        (
            {"inputs": [{**X, "datatype": "FLOAT"}], "outputs": [X]},
            r"Invalid enum value 'FLOAT' .*inputs\[0\].*write e\.g",
        ),
        ({"inputs": [{"name": "x"}], "outputs": [X]}, "missing required field `datatype`"),
        ({"inputs": {"x": "FP32"}, "outputs": [X]}, r"Expected `array`, got `object` - at `\$\.inputs`"),
    ],
    ids=["one side", "twice", "no name", "dimension", "datatype", "field", "no list"],
)
def test_bad_declared_signature(options: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        declared_signature(options)


@pytest.mark.parametrize("format", [Format.OPENVINO_IR, Format.SAVED_MODEL])
def test_a_model_of_several_files_must_have_a_place(format: Format) -> None:
    (finding,) = check_artifact(Artifact.from_bytes(b"main", format), frozenset({format}))
    assert finding.severity is Severity.ERROR
    assert "their folder is not known" in finding.message


@pytest.mark.parametrize(
    "reason",
    [
        "running Gather node. Status Message: indices element out of data bounds, idx=7 must be within [-3,2]",
        "Attempting to broadcast an axis by a dimension other than 1. 3 by 4",
        "The input tensor cannot be reshaped to the requested shape. Input shape:{3,2}, requested shape:{-1,4}",
        "MatMul dimension mismatch",
        "Shape inference input shapes {[3,2]}",
    ],
)
def test_what_an_operator_rejects_is_the_inputs_fault(reason: str) -> None:
    error = run_error(reason, is_status=True)
    assert type(error) is InvalidInput
    assert error.message == f"the model rejects these inputs: {reason}"
    assert type(run_error(reason, is_status=False)) is PenstockError


@pytest.mark.parametrize(
    "reason",
    [
        "Failed to allocate memory for requested buffer of size 140737488355328",
        "std::bad_alloc",
        "could not create a memory object of this shape",
        "CUDA failure 2: out of memory; size=3",
        "Unknown exception",
        "vector::_M_default_append",
    ],
)
def test_other_failures_are_the_engines(reason: str) -> None:
    error = run_error(reason, is_status=True)
    assert type(error) is PenstockError
    assert error.message == f"the model failed: {reason}"
