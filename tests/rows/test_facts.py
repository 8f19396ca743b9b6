import numpy as np
import pytest

from penstock.rows.facts import Dependent, Fact, broadcast, join
from penstock.rows.sizes import BATCH, plus, symbol, times

T = symbol("t")


def test_the_batch_axis_is_where_the_batch_size_is() -> None:
    assert [Fact(shape).axis for shape in ([BATCH, 3], [3, times(2, BATCH)], [T, 3], [])] == [0, 1, -1, -1]
    for shape in ([BATCH, BATCH], [times(BATCH, BATCH)], [plus(BATCH, 1)]):
        with pytest.raises(Dependent, match="not have one row for each input row"):
            Fact(shape)


def test_numbers_that_depend_on_the_batch_are_known() -> None:
    assert Fact.of([BATCH, 3]).holds_batch_size
    assert not Fact.of([T, 3]).holds_batch_size
    assert Fact.of(np.array([1, 2])).value.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((BATCH, 3), (3,)), (BATCH, 3)),
        (((BATCH, 3), (1, 3)), (BATCH, 3)),
        (((1, T), (BATCH, 1)), (BATCH, T)),
        (((T, 4), (4,)), (T, 4)),
        (((T, 1), (5, 1)), (5, 1)),
    ],
)
def test_shapes_that_meet(shapes: tuple[tuple[object, ...], ...], expected: tuple[object, ...]) -> None:
    assert broadcast(*shapes) == expected


@pytest.mark.parametrize("other", [(8, 3), (T, 3), (times(2, BATCH), 3), (BATCH,)])
def test_rows_that_meet_something_else(other: tuple[object, ...]) -> None:
    with pytest.raises(Dependent, match="combines rows with other rows"):
        broadcast((BATCH, 3), other)


def test_either_of_two_tensors() -> None:
    unknown = symbol("?")
    assert join(Fact([BATCH, 3]), Fact([BATCH, 4]), iter([unknown])).shape == (BATCH, unknown)
    for other in (Fact([3, BATCH]), Fact([BATCH]), Fact([times(2, BATCH), 3]), Fact([3, 3])):
        with pytest.raises(Dependent, match="different forms"):
            join(Fact([BATCH, 3]), other, iter([unknown]))
