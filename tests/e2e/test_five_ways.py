"""Odd models of ONNX, asked in five ways: every way has the answer of ONNX Runtime, or is refused with the cause."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnxruntime as ort
import pytest

from five_ways import NO_FORM, FiveWays, Inputs, raw_request, read_response
from odd_models import OddModel, odd_models
from penstock.tensor import Array, DataType
from processes import ServerProcess

MODELS = {model.name: model for model in odd_models()}
GROUPS = sorted({name.rpartition("_")[0] for name in MODELS})
COMPANIONS = 6
"""Copies of each request that are sent at once."""


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FiveWays]:
    folder = tmp_path_factory.mktemp("odd")
    for model in MODELS.values():
        (folder / f"{model.name}.onnx").write_bytes(model.data)
    with ServerProcess(*sorted(folder.iterdir())) as server:
        if not server.line:
            pytest.fail(server.end()[1])
        with FiveWays(server.address, folder) as clients:
            yield clients


def judged(model: OddModel, inputs: Inputs) -> dict[str, Array]:
    """The tensors that are right. ONNX Runtime has no form of BF16 in Python, and gives texts as ``str``."""
    if model.is_echo:
        return {"y": inputs["x"]}
    options = ort.SessionOptions()
    options.log_severity_level = 4
    run = ort.InferenceSession(model.data, options)
    names = [output.name for output in run.get_outputs() if output.type.startswith("tensor")]
    given = {name: array.astype(str) if array.dtype == object else array for name, array in inputs.items()}
    found = dict(zip(names, run.run(names, given), strict=True))
    encode = np.frompyfunc(str.encode, 1, 1)
    return {name: encode(array) if array.dtype == object else array for name, array in found.items()}


def difference(found: dict[str, Array], right: dict[str, Array]) -> str:
    """Where answers differ, bit by bit, except for the bits of a NaN; empty if they do not."""
    if found.keys() != right.keys():
        return f"outputs {sorted(found)}, not {sorted(right)}"
    for name, want in right.items():
        got = found[name]
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            return f"'{name}' is {got.dtype} {got.shape}, not {want.dtype} {want.shape}"
        if want.dtype == object:
            same = got.tolist() == want.tolist()
        elif DataType.from_numpy(want.dtype).is_float:
            is_nan = np.isnan(want)
            same = np.array_equal(np.isnan(got), is_nan) and got[~is_nan].tobytes() == want[~is_nan].tobytes()
        else:
            same = got.tobytes() == want.tobytes()
        if not same:
            return f"'{name}' is {got.tolist()}, not {want.tolist()}"
    return ""


def refusal(way: str, inputs: Inputs, right: dict[str, Array]) -> str:
    """What an error of this way has to name; empty if it must give the answer."""
    if way not in {"json", "grpc typed"}:
        return ""
    sent = {name: DataType.from_numpy(array.dtype) for name, array in inputs.items()}
    if way == "json" and not all(np.isfinite(inputs[name]).all() for name, each in sent.items() if each.is_float):
        return "JSON is malformed"
    received = [DataType.from_numpy(array.dtype) for array in right.values()] if way == "json" else []
    return next((each.value for each in [*sent.values(), *received] if each in NO_FORM), "")


@pytest.mark.parametrize("group", GROUPS)
def test_answers_are_equal_or_refused_with_the_cause(ways: FiveWays, group: str) -> None:
    for model in MODELS.values():
        if model.name.rpartition("_")[0] != group:
            continue
        for number, inputs in enumerate(model.requests):
            right = judged(model, inputs)
            for way, ask in ways.all.items():
                outputs, error = ask(model.name, inputs)
                cause = refusal(way, inputs, right)
                where = (model.name, number, way)
                if cause:
                    assert (where, cause in error) == (where, True), error
                else:
                    assert (where, error) == (where, "")
                    assert (where, difference(outputs, right)) == (where, "")


def test_requests_at_once_are_merged_only_where_it_is_right(ways: FiveWays) -> None:
    asked = [
        (model, inputs, ways.stub.ModelInfer.future(raw_request(model.name, inputs)))
        for model in MODELS.values()
        for inputs in model.requests * COMPANIONS
    ]
    answers = {}
    for model, inputs, future in asked:
        key = model.name, id(inputs)
        if key not in answers:
            answers[key] = judged(model, inputs)
        found = read_response(future.result())
        assert (model.name, difference(found.outputs, answers[key])) == (model.name, "")


def test_there_are_enough_models() -> None:
    assert len(MODELS) >= 100


BAD = {
    "shape": ({"x": np.ones((2, 3), np.float32)}, ["'x'", "Expected [-1, 2]"]),
    "datatype": ({"x": np.ones((2, 2), np.int32)}, ["'x'", "'INT32'", "expects 'FP32'"]),
    "missing": ({}, ["missing required input(s) ['x']"]),
    "unknown": (
        {"x": np.ones((2, 2), np.float32), "extra": np.ones((2, 2), np.float32)},
        ["'extra'", "inputs are ['x']"],
    ),
}


@pytest.mark.parametrize(("inputs", "cause"), BAD.values(), ids=BAD.keys())
def test_bad_requests_are_refused_alike(ways: FiveWays, inputs: dict[str, Array], cause: list[str]) -> None:
    errors = {way: ask("trait_constant", inputs).error for way, ask in ways.all.items()}
    embedded = errors.pop("embedded")
    assert len(set(errors.values())) == 1, errors
    for words in cause:
        assert words in errors["json"]
        assert words in embedded
