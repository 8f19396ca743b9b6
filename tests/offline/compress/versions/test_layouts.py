"""Layouts: which differ, which may be faster, and which is the fastest in an engine."""

from collections.abc import Sequence

import numpy as np
import pytest

import networks
from machines import VNNI
from penstock.artifact import Artifact
from penstock.clock import ManualClock
from penstock.dataset import Dataset, make_dataset
from penstock.measurement import Interval
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.compress.versions.layouts import IntegerLayout, fastest, make_layouts, promising
from penstock.offline.deadline import BuildDeadline

LINEAR, WIDE = IntegerLayout(QdqPlacement.LINEAR), IntegerLayout(QdqPlacement.WIDE)
PER_TENSOR = IntegerLayout(QdqPlacement.LINEAR, "per-tensor", ("onnxruntime",))
SYMMETRIC = IntegerLayout(QdqPlacement.LINEAR, "symmetric", ("openvino",))
BOTH = ("onnxruntime", "openvino")


def products() -> tuple[Artifact, Dataset]:
    x = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    return networks.mlp(256), make_dataset({"x": x}, None)


@pytest.mark.parametrize(
    ("engines", "kinds"),
    [((), ["", "per-tensor", "symmetric"]), (("onnxruntime",), ["", "per-tensor"]), (("openvino",), ["", "symmetric"])],
)
def test_layouts_that_differ_and_run_in_the_engines(engines: tuple[str, ...], kinds: list[str]) -> None:
    made = make_layouts(*products(), integer_scheme(VNNI), engines, {})
    assert [layout.kind for layout in made] == kinds
    assert len({model.digest for model in made.values()}) == len(made)


def test_the_fastest_come_first_with_the_engines_in_which_they_may_be_faster() -> None:
    fp32, _ = products()
    models = {layout: networks.mlp(size) for size, layout in enumerate((LINEAR, WIDE, SYMMETRIC), 8)}
    speeds = {
        LINEAR: {"onnxruntime": Interval(1.2, 1.1, 1.3), "openvino": Interval(0.5, 0.4, 0.6)},
        WIDE: {"onnxruntime": Interval(0.9, 0.8, 0.99), "openvino": Interval(0.8, 0.7, 0.9)},
        SYMMETRIC: {"openvino": Interval(1.5, 0.9, 1.8)},
    }
    layout_of = {model.digest: layout for layout, model in models.items()}
    found, notes = promising(
        fp32, models, lambda _, model, __: speeds[layout_of[model.digest]], BuildDeadline(), lambda *_: None
    )
    assert found == [SYMMETRIC, LINEAR._replace(engines=("onnxruntime",))]
    assert len(notes) == 3


def test_after_a_quarter_of_the_budget_no_further_layout_is_timed_if_one_may_be_faster() -> None:
    fp32, _ = products()
    clock = ManualClock()
    deadline = BuildDeadline(100.0, clock)
    gains = iter((0.5, 1.5))

    def look(*_: object) -> dict[str, Interval]:
        clock.advance(30.0)
        gain = next(gains)
        return {"onnxruntime": Interval(gain, 0.9 * gain, 1.1 * gain)}

    models = dict.fromkeys((LINEAR, WIDE, PER_TENSOR), fp32)
    found, notes = promising(fp32, models, look, deadline, lambda *_: None)
    assert found == [WIDE]
    assert notes[-1] == "INT8 (per-tensor scales) was not tried: there was no time within --budget"


@pytest.mark.parametrize(
    ("layouts", "engines", "expected"),
    [
        ([LINEAR, PER_TENSOR], BOTH, [LINEAR]),
        ([PER_TENSOR, SYMMETRIC, LINEAR], BOTH, [PER_TENSOR, SYMMETRIC]),
        ([PER_TENSOR, LINEAR, SYMMETRIC], BOTH, [PER_TENSOR, LINEAR]),
        ([PER_TENSOR, WIDE, LINEAR], (), [PER_TENSOR, WIDE]),
        ([], BOTH, []),
    ],
)
def test_the_fastest_layout_of_each_engine(
    layouts: Sequence[IntegerLayout], engines: Sequence[str], expected: Sequence[IntegerLayout]
) -> None:
    assert fastest(layouts, engines) == expected
