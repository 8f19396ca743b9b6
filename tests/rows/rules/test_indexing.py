# ruff: noqa: E501 - a model is easier to read in one line
import numpy as np
import pytest

import models
from row_graphs import keeps_rows, objection, parsed

W = (
    "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] end = {9223372036854775807}, int64[1] back = {-1}, "
    "int64[1] start = {-9223372036854775807}, int64[2] some = {2,0}, int64 first = {0}, float[2] values = {0,1}, int64 depth = {3}, int64[2] flat = {0,-1}"
)
SIZE = "h = Shape(x) n = Gather(h, zero) "


@pytest.mark.parametrize(
    "body",
    [
        "y = Slice(x, one, end, one)",
        "y = Slice(x, back, start, one, back)",
        "y = Slice(x, zero, end, zero)",
        SIZE + "y = Slice(x, zero, n, zero)",
        "a = Gather<axis = 1>(x, some) b = Gather<axis = 1>(x, first) i = Constant<value_ints = [1]>() c = Unsqueeze(b, i) y = Add(a, c)",
        "s = Sigmoid(x) i = Cast<to = 7>(s) y = GatherElements<axis = 1>(x, i)",
        "s = Sigmoid(x) i = Cast<to = 7>(s) y = ScatterElements<axis = 1>(x, i, x)",
        "s = Sigmoid(x) i = Cast<to = 7>(s) j = Slice(i, zero, one, one) y = GatherND<batch_dims = 1>(x, j) ",
        "p = Constant<value_ints = [0, 1, 0, 2]>() y = Pad(x, p)",
        "p = Constant<value_ints = [0, 1]>() y = Pad(x, p, , one)",
        "s = Sigmoid(x) i = Cast<to = 7>(s) o = OneHot(i, depth, values) y = Reshape(o, flat)",
        (
            "h = Shape(x) w = Gather(h, one) q = Squeeze(w) o = Constant<value_int = 1>() z = Constant<value_int = 0>() "
            "r = Range(z, q, o) f = Cast<to = 1>(r) y = Add(x, f)"
        ),
        "i = Unsqueeze(x, one) k = Trilu(i) y = Squeeze(k, one)",
    ],
)
def test_columns_by_place_and_index(body: str) -> None:
    keeps_rows(parsed(body, outputs="float[N] y" if "GatherND" in body else "float[N,M] y", weights=W, opset=18))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Slice(x, one, end, zero)", "mixes the rows"),
        ("y = Slice(x, back, start, zero, back)", "mixes the rows"),
        (SIZE + "c = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>() s = Slice(c, zero, n) u = Unsqueeze(s, one) y = Add(x, u)", "batch size"),
        ("y = Gather<axis = 0>(x, some)", "mixes the rows"),
        ("s = Sigmoid(x) i = Cast<to = 7>(s) y = GatherElements<axis = 0>(x, i)", "mixes the rows"),
        ("p = Constant<value_ints = [1, 0, 0, 0]>() y = Pad(x, p)", "mixes the rows"),
        (SIZE + "q = Squeeze(n) o = Constant<value_int = 1>() z = Constant<value_int = 0>() r = Range(z, q, o) f = Cast<to = 1>(r) u = Unsqueeze(f, one) y = Add(x, u)", "batch size"),
        ("y = Trilu(x)", "mixes the rows"),
        ("z = NonZero(x) f = Cast<to = 1>(z) r = ReduceSum(f) y = Add(x, r)", "depends on the rows"),
        ("i = Constant<value = int64[1,1] {0}>() u = Slice(x, zero, one, zero) y = ScatterND(x, i, u)", "mixes the rows"),
        ("c = Constant<value = float[8,4] {0.0,1.0,2.0,3.0,4.0,5.0,6.0,7.0,0.0,1.0,2.0,3.0,4.0,5.0,6.0,7.0,0.0,1.0,2.0,3.0,4.0,5.0,6.0,7.0,0.0,1.0,2.0,3.0,4.0,5.0,6.0,7.0}>() s = Sigmoid(x) i = Cast<to = 7>(s) y = GatherElements<axis = 1>(c, i)", "combines rows"),
        ("s = Sigmoid(x) i = Cast<to = 7>(s) j = Slice(i, zero, two, one) y = GatherND(x, j)", "mixes the rows"),
    ],
)  # fmt: skip
def test_rows_by_place_and_index(body: str, reason: str) -> None:
    assert reason in (found := objection(parsed(body, outputs="y", weights=W, opset=18)))
    assert found


def test_a_table_is_read_by_each_row() -> None:
    assert objection(models.gather()) == ""
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    nodes = [("Gather", ["table", "x"], ["y"])]
    keeps_rows(models.artifact(nodes, [("x", 7, ["N", 2])], [("y", 1, ["N", 2, 3])], {"table": table}))


def test_images_are_sampled_where_their_own_grid_says() -> None:
    inputs = "float[N,1,4,4] x, float[N,2,2,2] g"
    keeps_rows(parsed("y = GridSample(x, g)", inputs, "float[N,1,2,2] y"))
