"""The calls that are compared."""

from __future__ import annotations

import numpy as np

from penstock.inputs.meanings import meanings_of
from penstock.inputs.sizes import Shapes
from penstock.offline.convert.base import Axis
from penstock.offline.convert.parity.cases import Maker
from penstock.rows.graph import read_graph
from penstock.tensor import DataType, Signature, TensorSpec
from tests.compared import artifact, parsed

Y = TensorSpec("y", DataType.FP32, (-1,))


def maker(*specs: TensorSpec, axes: dict[str, tuple[Axis, ...]] | None = None, seed: int = 0) -> Maker:
    signature = Signature(specs, (Y,))
    return Maker(signature, axes or {}, meanings_of(signature), seed)


IMAGE = TensorSpec("image", DataType.FP32, (-1, 3, -1, -1))
FREE = {"image": (Axis(0, "N"), Axis(2, "H", 16, 48), Axis(3, "W"))}
TABLE = TensorSpec("x", DataType.FP32, (-1, 4))


def test_small_sizes_come_first() -> None:
    sizes = [np.prod(shapes["image"]) for shapes in maker(IMAGE, axes=FREE).shapes()]
    assert sizes == sorted(sizes)


def test_sizes_stay_within_the_limits_of_their_axis() -> None:
    made = maker(IMAGE, axes=FREE)
    found = dict(made.sizes({"image": (1, 3, 32, 32)}))
    assert {name: {shapes["image"][0] for shapes in one} for name, one in found.items()}["N"] >= {2, 3}
    heights = {shapes["image"][2] for shapes in found["H"]}
    assert heights
    assert all(16 <= height <= 48 and height != 32 for height in heights)
    assert all(shapes["image"][:3] == (1, 3, 32) for shapes in found["W"])


def test_axes_with_one_name_change_together() -> None:
    specs = TensorSpec("a", DataType.FP32, (-1, 2)), TensorSpec("b", DataType.FP32, (-1, 5))
    made = maker(*specs, axes={"a": (Axis(0, "rows"),), "b": (Axis(0, "rows"),)})
    ((_, shapes),) = made.sizes({"a": (1, 2), "b": (1, 5)})
    assert all(one["a"][0] == one["b"][0] for one in shapes)


def test_axes_that_are_sums_follow_from_their_terms() -> None:
    specs = [TensorSpec(name, DataType.INT64, (1, -1)) for name in ("ids", "mask")]
    specs.append(TensorSpec("past", DataType.FP32, (1, -1)))
    axes: dict[str, tuple[Axis, ...]] = {"ids": (Axis(1, "T"),), "past": (Axis(1, "P"),), "mask": (Axis(1, "P + T"),)}
    made = maker(*specs, axes=axes)
    base: Shapes = {"ids": (1, 4), "past": (1, 3), "mask": (1, 7)}
    found = dict(made.sizes(base))
    assert set(found) == {"T", "P"}
    every = [*found["T"], *found["P"], made.mixed(base), *made.lengths(base, 40)]
    assert all(one["mask"][1] == one["ids"][1] + one["past"][1] for one in every)
    assert {"ids": (1, 37), "past": (1, 3), "mask": (1, 40)} in every


def test_every_free_dimension_differs_in_mixed() -> None:
    mixed = maker(IMAGE, axes={"image": (Axis(0, "N"), Axis(2, "H"), Axis(3, "W"))}).mixed({"image": (1, 3, 32, 32)})
    assert all(one != other for one, other in zip(mixed["image"], (1, 32, 32), strict=False) if other != 3)


def test_extreme_values() -> None:
    cases = {case.label: case for case in maker(TABLE).extremes({"x": (3, 4)})}
    assert not cases["zeros values"].inputs["x"].any()
    assert len(np.unique(cases["repeated values"].inputs["x"])) == 1
    assert np.abs(cases["huge values"].inputs["x"]).max() > 1e3
    assert np.abs(cases["tiny values"].inputs["x"]).max() < 1e-4
    assert (cases["negative values"].inputs["x"] <= 0).all()
    assert {label for label, case in cases.items() if case.is_extreme} == {"huge values", "large values", "tiny values"}
    assert all(case.inputs["x"].dtype == np.float32 for case in cases.values())


def test_ids_are_the_least_and_the_largest() -> None:
    ids = TensorSpec("input_ids", DataType.INT64, (-1, -1))
    model = parsed(
        f"g (int64[N,T] input_ids) => (float[N,T,2] y) <float[9,2] w = {{{', '.join(['1.0'] * 18)}}}> "
        "{ y = Gather(w, input_ids) }"
    )
    graph = read_graph(artifact(model).data)
    signature = Signature((ids,), (Y,))
    made = Maker(signature, {}, meanings_of(signature, graph), 0)
    cases = {case.label: case.inputs["input_ids"] for case in made.extremes({"input_ids": (2, 8)})}
    assert set(cases["zeros values"].ravel()) == {0}
    assert set(cases["huge values"].ravel()) == {8}
    assert len(np.unique(cases["repeated values"])) == 1


def test_a_blank_image_has_the_usual_size() -> None:
    (case,) = maker(IMAGE).blank({"image": (1, 3, 32, 32)})
    assert case.inputs["image"].shape == (1, 3, 224, 224)
    assert len(np.unique(case.inputs["image"])) == 1


def test_empty_calls_only_for_axes_that_permit_them() -> None:
    assert list(maker(TABLE).empty({"x": (1, 4)})) == []
    (case,) = maker(TABLE, axes={"x": (Axis(0, "N", 0),)}).empty({"x": (1, 4)})
    assert case.is_empty
    assert case.inputs["x"].shape == (0, 4)


def test_one_seed_gives_the_same_calls() -> None:
    first, second, other = (maker(TABLE, seed=seed).plausible({"x": (3, 4)}).inputs["x"] for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


def test_every_id_of_a_table_is_in_a_call() -> None:
    ids = TensorSpec("input_ids", DataType.INT64, (-1, -1))
    model = parsed(
        f"g (int64[N,T] input_ids) => (float[N,T,2] y) <float[9,2] w = {{{', '.join(['1.0'] * 18)}}}> "
        "{ y = Gather(w, input_ids) }"
    )
    signature = Signature((ids,), (Y,))
    made = Maker(signature, {}, meanings_of(signature, read_graph(artifact(model).data)), 0)
    (case,) = made.enumerated({"input_ids": (1, 4)})
    assert case.inputs["input_ids"].shape == (3, 4)
    assert set(case.inputs["input_ids"].ravel()) == set(range(9))


def test_a_truth_value_is_false_and_true() -> None:
    flag = TensorSpec("flag", DataType.BOOL, ())
    made = maker(flag, TABLE)
    found = [case.inputs["flag"].item() for case in made.enumerated({"flag": (), "x": (2, 4)})]
    assert found == [False, True]


def test_unusual_values() -> None:
    number = TensorSpec("number", DataType.INT64, (-1,))
    cases = list(maker(TABLE, number).unusual({"x": (3, 4), "number": (3,)}))
    assert any(np.isnan(case.inputs["x"]).sum() == 1 for case in cases)
    assert any(np.isinf(case.inputs["x"]).sum() == 1 for case in cases)
    assert any((case.inputs["number"] > 2**31).sum() == 1 for case in cases)
