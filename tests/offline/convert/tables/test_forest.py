from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from conversions import run
from penstock.offline.convert.tables.forest import Forest, GraphWriter, Tree, rounded
from penstock.tensor import Array, DataType

HOLDS = {"<=": np.less_equal, "<": np.less, ">": np.greater}
LEAF = Tree(np.array([-1]), np.zeros(1), np.array([-1]), np.array([-1]), np.zeros(1, bool), np.array([[2.0, 5.0]]))


def stump(threshold: float, missing_yes: bool = False, **sets: tuple[int, ...]) -> Tree:
    """One comparison: 1 if it holds, else 0."""
    children = np.array([1, -1, -1]), np.array([2, -1, -1])
    values = np.array([[0.0], [1.0], [0.0]])
    missing = np.array([missing_yes, False, False])
    return Tree(
        np.array([0, -1, -1]),
        np.array([threshold, 0, 0]),
        *children,
        missing,
        values,
        0,
        {0: sets["of"]} if sets else {},
    )


def sums(forest: Forest, x: Array, *, wide: bool = False) -> Array:
    writer = GraphWriter()
    datatype = DataType.from_numpy(x.dtype)
    output = (forest.write_wide if wide else forest.write)(writer, "x", datatype)
    inputs = [helper.make_tensor_value_info("x", datatype.onnx, [None, x.shape[1]])]
    graph = helper.make_graph(
        writer.nodes,
        "g",
        inputs,
        [helper.make_tensor_value_info(output, 11 if wide else 1, None)],
        writer.constants,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    return run(helper.make_model_gen_version(graph, opset_imports=opsets), {"x": x})[output]


@given(st.floats(allow_nan=False), st.sampled_from(list(HOLDS)), st.integers(-2, 2))
def test_rounding_keeps_the_branch_of_every_float32(threshold: float, compare: str, steps: int) -> None:
    with np.errstate(over="ignore"):
        x = np.float32(threshold)
        for _ in range(abs(steps)):
            x = np.nextafter(x, np.float32(np.sign(steps) * np.inf))
    found = rounded(np.array([threshold]), compare)
    assert found.dtype == np.float32
    assert HOLDS[compare](np.float64(x), threshold) == HOLDS[compare](x, found[0])


@pytest.mark.parametrize("compare", HOLDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_comparison_in_onnx_is_that_of_the_source(compare: str, dtype: type) -> None:
    threshold = 0.1
    x = np.array([[np.nextafter(dtype(threshold), dtype(towards))] for towards in (-1, 1)] + [[threshold]], dtype)
    wanted = HOLDS[compare](x.astype(np.float64), threshold)
    np.testing.assert_array_equal(sums(Forest([stump(threshold)], compare, np.zeros(1), 1), x), wanted)


@pytest.mark.parametrize("missing_yes", [False, True])
def test_missing_values_take_their_branch(missing_yes: bool) -> None:
    forest = Forest([stump(0.5, missing_yes)], "<=", np.zeros(1), 1)
    np.testing.assert_array_equal(sums(forest, np.array([[np.nan]], np.float32)), [[missing_yes]])


def test_a_set_is_a_chain_of_comparisons() -> None:
    forest = Forest([stump(0, of=(0, 3, 40))], "<=", np.zeros(1), 2, categorical=[0])
    x = np.array([[0, 9], [3, 9], [3.7, 9], [40, 9], [1, 3], [-0.5, 9], [np.nan, 9]], np.float32)
    np.testing.assert_array_equal(sums(forest, x)[:, 0], [1, 1, 1, 1, 0, 0, 0])
    truncated = forest._replace(towards_zero=True)
    np.testing.assert_array_equal(sums(truncated, x)[:, 0], [1, 1, 1, 1, 0, 1, 0])


def test_an_empty_set_has_no_member() -> None:
    forest = Forest([stump(0, of=())], "<=", np.zeros(1), 1)
    np.testing.assert_array_equal(sums(forest, np.array([[0], [np.inf]], np.float32)), [[0], [0]])


def test_values_that_count_as_missing() -> None:
    forest = Forest([stump(5, missing_yes=False)], "<=", np.zeros(1), 2, missing=(-1, 1), missing_in=[0])
    np.testing.assert_array_equal(sums(forest, np.array([[0, 0], [2, 0]], np.float32)), [[0], [1]])


def test_leaves_alone_and_bases_are_added() -> None:
    forest = Forest([LEAF, LEAF], "<=", np.array([10.0, 20.0]), 1)
    np.testing.assert_array_equal(sums(forest, np.zeros((2, 1), np.float32)), [[14, 30], [14, 30]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_wide_sums_have_the_precision_of_float64(dtype: type) -> None:
    third = np.array([[0.0], [1 / 3], [0.0]])
    trees = [stump(0.5)._replace(values=third), stump(2.0)._replace(values=3 * third, target=1)]
    x = np.array([[0.0], [1.0], [3.0], [np.nan]], dtype)
    found = sums(Forest(trees, "<=", np.array([0.1, 0.2]), 1), x, wide=True)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, [[0.1 + 1 / 3, 1.2], [0.1, 1.2], [0.1, 0.2], [0.1, 0.2]])
