"""Conditions of steps."""

from __future__ import annotations

import math
import operator
import tracemalloc
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, InvalidConfig
from penstock.pipeline.condition import Condition
from penstock.tensor import Array, DataType

OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
NUMBERS = (0, 1, -1, 2, 127, 2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2, 2**63 - 1, -(2**53) - 1, -(2**63), 2**64 - 1)
FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 0.1, -0.1, 0.5, 1.0, 65504.0, 6e-8, 3e38, 2.0**53, 1e308, 5e-324)
BOUNDS = st.sampled_from([-1e308, -1.0, -0.0, 0.0, 5e-324, 0.5, 1.0, 1e308])
CONDITIONS = st.builds(Condition, st.just("t"), st.sampled_from(["<", "<=", "==", "!=", ">=", ">"]), BOUNDS)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("t", [1, 2, -1]),
        ("not t", [0]),
        (" t > 0.5 ", [1, 2]),
        ("t<1", [0, -1]),
        ("t >=1", [1, 2]),
        ("t<= 1e0", [0, 1, -1]),
        ("t == 2", [2]),
        ("t != 2", [0, 1, -1]),
    ],
)
@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_a_condition_holds_for_one_number(text: str, holds: list[int], dtype: type) -> None:
    condition = Condition.parse(text)
    assert condition.tensor == "t"
    assert [n for n in (0, 1, 2, -1) if condition.holds(np.full((1, 1), n, dtype))] == [
        n for n in (0, 1, 2, -1) if n in holds
    ]


def test_a_flag_is_a_condition() -> None:
    assert Condition.parse("in/put:0").holds(np.array([True]))
    assert Condition.parse("not in/put:0").holds(np.array(False))


def single(datatype: DataType) -> Iterator[Array]:
    """Arrays of one number, with the numbers at which comparisons differ."""
    if datatype.dtype == bool:
        yield from (np.array([flag]) for flag in (False, True))
    elif datatype.is_float:
        with np.errstate(over="ignore"):
            yield from (np.array([number], np.float64).astype(datatype.dtype) for number in FLOATS)
    else:
        limits = np.iinfo(datatype.dtype)
        yield from (np.array([number], datatype.dtype) for number in NUMBERS if limits.min <= number <= limits.max)


@pytest.mark.parametrize("datatype", [one for one in DataType if one is not DataType.BYTES], ids=lambda one: one.value)
def test_numbers_are_compared_as_floats_of_python(datatype: DataType) -> None:
    """NaN meets ``!=`` alone, -0.0 is 0, and integers that FP64 cannot hold are rounded."""
    seen = 0
    for array in single(datatype):
        value = float(array.tolist()[0])  # exact, or rounded to even as by the hardware
        for bound in (0.0, -0.0, 0.1, 0.5, 1.0, -1.0, 65504.0, 2.0**53, 2.0**53 + 2, -(2.0**63), 2.0**64, 1e308):
            for sign, compare in OPERATORS.items():
                assert Condition("t", sign, bound).holds(array) is compare(value, bound), f"{array} {sign} {bound}"
                seen += 1
        assert Condition.parse("t").holds(array) is (value != 0)
        assert Condition.parse("not t").holds(array) is (value == 0)
    assert seen >= 2 * 12 * 6


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16], ids=str)
def test_nan_is_no_number(dtype: type) -> None:
    for bound in (0.0, 1.0, -1.0):
        met = [sign for sign in OPERATORS if Condition("t", sign, bound).holds(np.array([math.nan] * 2, dtype))]
        assert met == ["!="]
    with pytest.raises(InvalidArgument, match="holds for some rows only"):
        Condition.parse("t == 0").holds(np.array([math.nan, 0.0], dtype))


@pytest.mark.parametrize("text", ["", "not", "a b", "t >", "t > x", "t > nan", "t > inf", "not t > 1", "t = 1", "> 1"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    if text == "not":
        assert Condition.parse(text).tensor == "not", "a tensor may be called so"
        return
    with pytest.raises(InvalidConfig, match="cannot be read"):
        Condition.parse(text)


def test_rows_must_agree() -> None:
    condition = Condition.parse("t > 1")
    assert condition.holds(np.array([[2], [3]]))
    assert not condition.holds(np.array([[1], [0]]))
    with pytest.raises(InvalidArgument, match="'t > 1' holds for some rows only"):
        condition.holds(np.array([[2], [1]]))


def test_text_and_nothing_are_no_numbers() -> None:
    with pytest.raises(InvalidArgument, match="tensor has text"):
        Condition.parse("t").holds(np.array([b"1"], object))
    with pytest.raises(InvalidArgument, match="tensor has no element"):
        Condition.parse("t").holds(np.zeros(0))


@given(CONDITIONS, CONDITIONS, st.floats())
def test_of_conditions_that_exclude_one_another_one_holds_at_most(
    one: Condition, other: Condition, value: float
) -> None:
    array = np.array([value])
    if one.excludes(other):
        assert other.excludes(one)
        assert not (one.holds(array) and other.holds(array))


@pytest.mark.parametrize(
    ("one", "other", "excludes"),
    [
        ("t", "not t", True),
        ("t > 0.5", "t <= 0.5", True),
        ("t >= 0.5", "t <= 0.5", False),
        ("t == 1", "t == 2", True),
        ("t != 1", "t != 2", False),
        ("t < 1", "t > 2", True),
        ("t > 1", "t < 2", False),
        ("t", "not u", False),
    ],
)
def test_conditions_that_exclude_one_another(one: str, other: str, excludes: bool) -> None:
    assert Condition.parse(one).excludes(Condition.parse(other)) is excludes


def test_a_large_tensor_is_compared_without_another_of_its_size() -> None:
    array = np.zeros(1 << 22, np.int8)
    tracemalloc.start()
    try:
        assert Condition("x", "<", 0.5).holds(array)
        assert tracemalloc.get_traced_memory()[1] < 3 * array.nbytes
    finally:
        tracemalloc.stop()
