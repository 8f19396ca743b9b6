"""The calls on which a source and its ONNX model are compared."""

import numpy as np
import pytest

from penstock.inputs.meaning import Meaning, Role
from penstock.offline.convert.base import Axis
from penstock.offline.convert.parity.cases import Maker
from penstock.tensor import DataType, Signature, TensorSpec

SPECS = (TensorSpec("x", DataType.FP32, (-1, -1, 3)), TensorSpec("mask", DataType.FP32, (-1, -1)))
AXES = {"x": (Axis(0, "N"), Axis(1, "L", 2, 16)), "mask": (Axis(0, "N"), Axis(1, "L", 2, 16))}


@pytest.fixture
def maker():
    meanings = {spec.name: Meaning(Role.TENSOR, "") for spec in SPECS}
    return Maker(Signature(SPECS, ()), AXES, meanings, 0)


def test_axes_of_one_name_have_one_size(maker):
    shapes = list(maker.shapes())
    assert shapes
    for one in shapes:
        assert one["x"][:2] == one["mask"]
        assert 2 <= one["x"][1] <= 16


def test_shapes_that_hide_nothing_come_first(maker):
    first = next(maker.shapes())
    assert first["x"][1] > 1


def test_further_sizes_are_within_the_limits(maker):
    shapes = next(maker.shapes())
    found = dict(maker.sizes(shapes))
    assert list(found) == ["N", "L"]
    assert found["L"]
    for one in found["L"]:
        assert one["x"][1] == one["mask"][1] != shapes["x"][1]
        assert 2 <= one["x"][1] <= 16
    assert all(one["x"][0] == one["mask"][0] != shapes["x"][0] for one in found["N"])


def test_cases_have_the_types_of_the_signature(maker):
    shapes = next(maker.shapes())
    one, other = maker.plausible(shapes), maker.plausible(shapes)
    for spec in SPECS:
        assert spec.admits(one.inputs[spec.name].shape)
        assert one.inputs[spec.name].dtype == spec.datatype.dtype
    assert not np.array_equal(one.inputs["x"], other.inputs["x"])
    assert not one.is_empty
