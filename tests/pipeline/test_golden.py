from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.errors import IntegrityError
from penstock.pipeline.direct import Direct
from penstock.pipeline.golden import (
    Example,
    ExampleInput,
    Golden,
    Recorded,
    difference,
    observed,
    record,
    recorded,
    replay,
)
from penstock.pipeline.streaming.models import LocalModel
from penstock.tensor import DataType, to_wire
from pipelines import FEATURES, LOCAL, WEIGHT, function

FLOATS = np.linspace(-1, 1, 10_000, dtype=np.float32)


@pytest.mark.parametrize(
    "value",
    [
        *("text", b"file", None, [], ["a", "b"], FLOATS, np.float32(2).reshape(()), np.arange(6).reshape(2, 3)),
        *(
            np.array([b"x"], object),
            np.array([np.nan, np.inf, 1.0]),
            [FLOATS, FLOATS * 2],
            np.zeros((0, 4), np.float32),
        ),
    ],
)
def test_a_value_equals_itself_also_after_storing(value: Any) -> None:
    stored = msgspec.json.decode(msgspec.json.encode(recorded(value)), type=Recorded)
    assert difference(stored, recorded(value), 0.0) == ""


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        ("text", "other", "its content is different"),
        ("text", b"text", "it is a file, and was a text"),
        ("text", None, "it is absent, and was a text"),
        (["a"], ["a", "b"], r"it is list \[2\], and was list \[1\]"),
        (["a"], ["b"], "element 0: its content is different"),
        (FLOATS, FLOATS.astype(np.float64), r"it is FP64 \[10000\], and was FP32"),
        (FLOATS, FLOATS[:-1], r"it is FP32 \[9999\]"),
        (FLOATS, FLOATS + 0.01, "it differs by 0.01, more than the tolerance of 0.001"),
        (FLOATS, np.full_like(FLOATS, np.nan), "NaN or infinity"),
        (np.arange(3), np.array([0, 1, 3]), "its content is different"),
        (np.zeros(3), np.full(3, 1e-3), "it differs by 0.001"),
    ],
)
def test_differences_are_named(before: Any, now: Any, reason: str) -> None:
    found = difference(recorded(before), recorded(now), 1e-3)
    assert found
    pytest.importorskip("re").compile(reason).search(found) or pytest.fail(found)


@pytest.mark.parametrize("place", [0, 1, 2047, 4094, 4095])
def test_every_element_of_a_small_array_is_compared(place: int) -> None:
    before, now = np.linspace(-1, 1, 4096), np.linspace(-1, 1, 4096)
    now[place] += 0.01
    assert difference(recorded(before), recorded(now), 1e-3)


@pytest.mark.parametrize("shape", [(3, 224, 224), (1, 640, 640)])
def test_a_change_of_one_row_of_a_picture_is_seen(shape: tuple[int, int, int]) -> None:
    now = np.ones(shape, np.float32)
    now[-1, shape[1] // 2] = 0.9
    assert difference(recorded(np.ones(shape, np.float32)), recorded(now), 1e-3)


def test_floats_within_the_tolerance_are_equal() -> None:
    assert difference(recorded(FLOATS), recorded(FLOATS * (1 + 1e-5)), 1e-4) == ""


def test_forged_records_are_no_crash() -> None:
    before = recorded(FLOATS)
    for forged in (msgspec.structs.replace(before, sample=b"123"), msgspec.structs.replace(before, items=(before,))):
        assert difference(forged, before, 1.0) == "its recorded elements are incomplete"


def _golden() -> Golden:
    runner = Direct(observed(function()), LOCAL)
    inputs = {"features": ExampleInput(array=bytes(to_wire(FEATURES)), datatype=DataType.FP32, shape=(3,))}
    return Golden((Example(inputs, record(runner, {"features": FEATURES})),), {"linear": "fp32"})


def _runner(factor: float) -> Direct:
    changed = LocalModel(lambda inputs: {"y": inputs["x"] @ WEIGHT * np.float32(factor)})
    return Direct(observed(function()), {"linear": changed})


def test_all_steps_are_recorded_and_replayed() -> None:
    golden = _golden()
    assert set(golden.examples[0].values) == {"logits", "p", "label", "score"} & set(golden.examples[0].values) | {
        "logits",
        "p",
        "label",
    }
    replay(_runner(1.0), golden, {}, {"linear": "fp32"})
    replay(_runner(1.00001), golden, {}, {"linear": "fp32"})


def test_the_first_step_that_differs_is_named() -> None:
    with pytest.raises(
        IntegrityError, match="example 1 .* step 'linear' is the first that differs: in 'logits', it differs by"
    ):
        replay(_runner(1.01), _golden(), {}, {"linear": "fp32"})
    replay(_runner(1.01), _golden(), {}, {"linear": "fp32"}, {"linear": 0.05})


@pytest.mark.parametrize("factor", [1.0003, 0.9997])
def test_the_tolerance_is_a_ten_thousandth(factor: float) -> None:
    with pytest.raises(IntegrityError, match="more than the tolerance of"):
        replay(_runner(factor), _golden(), {}, {"linear": "fp32"})


def test_steps_after_another_variant_are_not_compared() -> None:
    replay(_runner(2.0), _golden(), {}, {"linear": "int8"})


def test_an_example_that_fails_is_refused() -> None:
    def fails(inputs: object) -> Any:
        raise IntegrityError("no")

    with pytest.raises(IntegrityError, match="example 1 fails: step 'linear': no"):
        replay(Direct(observed(function()), {"linear": LocalModel(fails)}), _golden(), {}, {"linear": "fp32"})
