"""Ways to quantise: their order, and what they are called."""

import numpy as np

import networks
from machines import VNNI
from penstock.dataset import make_dataset
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.compress.versions.layouts import IntegerLayout
from penstock.offline.compress.versions.ways import IntegerChoice, calibrated_ways, storing_ways
from penstock.offline.deadline import BuildDeadline

DATA = make_dataset({"x": np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)}, None)
LAYOUTS = IntegerLayout(QdqPlacement.LINEAR), IntegerLayout(QdqPlacement.LINEAR, "per-tensor", ("onnxruntime",))


def test_quick_ways_come_first_and_every_layout_has_the_careful_one() -> None:
    choice = IntegerChoice((RangeMethod.MIN_MAX, RangeMethod.MSE))
    ways = calibrated_ways(
        networks.mlp(), DATA, choice, integer_scheme(VNNI), LAYOUTS, BuildDeadline(), lambda *_: None
    )
    assert [way.name for way in ways] == [
        "mse-linear",
        "best-linear",
        "best-linear-per-tensor",
        "min-max-linear",
    ]
    assert [way.is_quick for way in ways] == [True, False, False, False]
    assert [way.is_first for way in ways] == [False, True, True, False]
    assert ways[0].title == "INT8 (MSE ranges)"


def test_a_way_makes_its_model_once() -> None:
    choice = IntegerChoice((RangeMethod.MSE,), careful=False)
    (way,) = calibrated_ways(
        networks.mlp(), DATA, choice, integer_scheme(VNNI), LAYOUTS[:1], BuildDeadline(), lambda *_: None
    )
    assert way.make() is way.make()


def test_stored_weights_are_smaller_the_fewer_bits_they_have() -> None:
    ways = storing_ways(networks.mlp(256), DATA)
    sizes = {way.title: way.make().size_bytes for way in ways}
    assert sorted(sizes, key=sizes.__getitem__) == ["int4-weights", "int8-weights", "fp16-weights"]
