from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.inputs.meanings import meanings_of
from penstock.inputs.sizes import CHOICES, free_axes, shapes_to_try
from penstock.tensor import DataType, Signature, TensorSpec

FP32, INT64 = DataType.FP32, DataType.INT64


def first(*specs: TensorSpec, axes: dict[str, list[str]] | None = None, outputs: tuple[TensorSpec, ...] = ()):
    signature = Signature(specs, outputs)
    return next(shapes_to_try(signature, meanings_of(signature), axes))


DIMS = st.lists(st.sampled_from([-1, 1, 2, 3, 80]), max_size=4).map(tuple)
NAMES = st.sampled_from(["x", "image", "input_ids", "mask", "waveform", "state", "x_lens", "mel"])


@given(st.lists(st.tuples(NAMES, st.sampled_from([FP32, INT64]), DIMS), min_size=1, max_size=3), st.integers(1, 4))
def test_every_shape_fits_its_spec(inputs: list[tuple[str, DataType, tuple[int, ...]]], rows: int) -> None:
    specs = tuple(TensorSpec(f"{name}_{n}", datatype, shape) for n, (name, datatype, shape) in enumerate(inputs))
    signature = Signature(specs, ())
    found = list(shapes_to_try(signature, meanings_of(signature), rows=rows))
    assert 1 <= len(found) <= len(CHOICES)
    assert all(one != other for n, one in enumerate(found) for other in found[:n])
    for shapes in found:
        for spec in specs:
            assert spec.admits(shapes[spec.name])
            assert min(shapes[spec.name], default=1) > 0
            assert spec.shape[:1] != (-1,) or shapes[spec.name][0] == rows


def test_sizes_by_role() -> None:
    assert first(TensorSpec("x", FP32, (-1, 3, -1, -1)))["x"] == (1, 3, 224, 224)
    assert first(TensorSpec("x", FP32, (-1, -1, -1, 3)))["x"] == (1, 224, 224, 3)
    assert first(TensorSpec("input_ids", INT64, (-1, -1)))["input_ids"] == (1, 32)
    assert first(TensorSpec("wav", FP32, (-1, -1)))["wav"] == (1, 16_000)
    assert first(TensorSpec("mel", FP32, (-1, -1, 80)))["mel"] == (1, 100, 80)


def test_axes_of_one_name_have_one_size() -> None:
    specs = (TensorSpec("a", FP32, (-1, -1, 7)), TensorSpec("b", FP32, (-1, -1, 9)), TensorSpec("c", FP32, (5, -1)))
    shapes = first(*specs, axes={"a": ["N", "L", ""], "b": ["N", "L", ""], "c": ["", "N"]})
    assert shapes["a"][:2] == shapes["b"][:2]
    assert shapes["c"] == (5, shapes["a"][0])


def test_a_name_may_be_a_sum() -> None:
    specs = (
        TensorSpec("input_ids", INT64, (-1, -1)),
        TensorSpec("attention_mask", INT64, (-1, -1)),
        TensorSpec("past_key_values.0.key", FP32, (-1, 4, -1, 8)),
    )
    axes = {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "past + sequence"],
        "past_key_values.0.key": ["batch", "", "past", ""],
    }
    outputs = (TensorSpec("present.0.key", FP32, (-1, 4, -1, 8)),)
    shapes = first(*specs, axes=axes, outputs=outputs)
    past, sequence = shapes["past_key_values.0.key"][2], shapes["input_ids"][1]
    assert shapes["attention_mask"] == (1, past + sequence)


def test_the_first_free_axis_of_a_state_counts_rows() -> None:
    outputs = (TensorSpec("stateN", FP32, (2, -1, 8)),)
    assert first(TensorSpec("state", FP32, (2, -1, 8)), outputs=outputs)["state"] == (2, 1, 8)


@pytest.mark.parametrize(("shape", "free"), [((-1, 3), []), ((-1, 3, -1, -1), [2, 3]), ((), []), ((4, -1), [1])])
def test_free_axes_are_those_after_the_first(shape: tuple[int, ...], free: list[int]) -> None:
    assert free_axes(TensorSpec("x", FP32, shape)) == free
