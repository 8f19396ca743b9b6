from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rows.sizes import (
    BATCH,
    Number,
    Size,
    depends_on_batch,
    divide,
    equal,
    interleaved,
    minus,
    modulo,
    outer_of,
    plain,
    plus,
    quotient,
    result,
    symbol,
    times,
    to_float,
    to_integer,
)

T, H = symbol("t"), symbol("h")
VALUES = {BATCH.symbols[0]: 5, T.symbols[0]: 7, H.symbols[0]: 11}
SIZES = st.builds(
    lambda factor, symbols: Size(factor, tuple(sorted(symbols))) if symbols else factor,
    st.integers(1, 6),
    st.lists(st.sampled_from(sorted(VALUES)), max_size=3),
)


def number(size: Number) -> int | None:
    """The value of ``size``; None if it is the result of a computation."""
    if not isinstance(size, Size):
        return size
    total = size.factor
    for each in size.symbols:
        if each not in VALUES:
            return None
        total *= VALUES[each]
    return total


@given(SIZES, SIZES)
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (times, lambda a, b: a * b),
        (plus, lambda a, b: a + b),
        (minus, lambda a, b: a - b),
        (divide, lambda a, b: a // b),
        (modulo, lambda a, b: a % b),
        (equal, lambda a, b: int(a == b)),
    ],
)
def test_what_is_computed_is_right(
    operation: Callable[..., Number], expected: Callable[[int, int], int], first: Number, second: Number
) -> None:
    found, wanted = operation(first, second), expected(number(first), number(second))
    assert number(found) in {None, wanted}
    if not isinstance(found, Size):
        assert found == wanted
    assert not depends_on_batch(found) or depends_on_batch(first) or depends_on_batch(second)


@given(SIZES, SIZES)
def test_a_quotient_is_exact(first: Number, second: Number) -> None:
    assert quotient(times(first, second), second) == first
    found = quotient(first, second)
    assert found is None or times(found, second) == first


def test_how_a_size_depends_on_the_batch() -> None:
    assert [size.batch for size in (T, BATCH, times(BATCH, 3), times(BATCH, BATCH), plus(BATCH, 1))] == [0, 1, 1, 2, 2]
    assert result("f", T).batch == 0
    assert result("f", T, BATCH).batch == 2
    assert plus(T, 1).computed == list(plus(T, 1).symbols)


def test_equal_computations_are_equal_and_others_are_not() -> None:
    assert plus(T, 1) == plus(1, T) != plus(T, 2)
    assert result("f", T, H) != result("f", H, T)
    assert divide(T, 2) != divide(to_float(T), 2.0)


def test_rows_that_are_gone_through_several_times() -> None:
    size = interleaved(times(T, 2), 3)
    assert isinstance(size, Size)
    assert (size.batch, outer_of(size), plain(size)) == (1, times(T, 2), times(times(T, 6), BATCH))
    assert size != plain(size)
    assert interleaved(1, 3) == times(3, BATCH)


def test_floats_are_followed_while_they_are_exact() -> None:
    assert (to_float(3), to_integer(2.7), to_integer(to_float(BATCH)), to_integer(BATCH)) == (3.0, 2, BATCH, BATCH)
    assert isinstance(to_float((1 << 24) + 1), Size)
    assert isinstance(times(0.1, 30.0), Size), "FP32 rounds otherwise than Python"
    assert isinstance(to_integer(float("inf")), Size)
