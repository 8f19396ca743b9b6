"""Sizes of axes as products of an integer and symbols, and the arithmetic with which models compute shapes.

A number is an ``int``, a ``float`` or a ``Size``. One symbol is the batch size. Every other symbol stands for a number that is equal
for all requests that can be merged. The result of an operation that is not a product becomes a symbol, which names the operation and
its operands; so equal symbols are equal numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

Number = Any
"""``int | float | Size``."""

_BATCH = "N"
_MAX_EXACT = 1 << 24
"""Up to here FP32 holds every integer."""


class _Interleaved(str):
    """The symbol of ``outer`` times the batch size, of an axis that goes through all rows ``outer`` times."""

    __slots__ = ("outer",)
    outer: Number


class Size:
    """``factor`` times the product of ``symbols``, which are sorted."""

    __slots__ = ("batch", "factor", "symbols")

    def __init__(self, factor: int, symbols: tuple[str, ...]) -> None:
        self.factor = factor
        self.symbols = symbols
        found = [each for each in symbols if each.startswith(_BATCH)]
        is_multiple = len(found) == 1 and (found[0] == _BATCH or isinstance(found[0], _Interleaved))
        self.batch = 0 if not found else 1 if is_multiple else 2
        """0: does not depend on the batch size; 1: a multiple of it; 2: depends on it otherwise."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.factor == other.factor and self.symbols == other.symbols

    def __hash__(self) -> int:
        return hash((self.factor, self.symbols))

    def __repr__(self) -> str:
        return "*".join([str(self.factor), *self.symbols])

    @property
    def computed(self) -> list[str]:
        """The symbols that are results of computations. The others are sizes of axes, which are not negative."""
        return [each for each in self.symbols if each[1:2] == ":"]


BATCH = Size(1, (_BATCH,))


def interleaved(outer: Number, inner: Number) -> Number:
    """The size of a batch axis: ``outer`` times all rows, each with ``inner`` elements."""
    if outer == 1:
        return times(inner, BATCH)
    name = _Interleaved(f"{_BATCH}|{outer!r}")
    name.outer = outer
    return times(inner, Size(1, (name,)))


def outer_of(size: Number) -> Number:
    """How often a batch axis goes through the rows."""
    symbols = size.symbols if isinstance(size, Size) else ()
    return next((each.outer for each in symbols if isinstance(each, _Interleaved)), 1)


def plain(size: Number) -> Number:
    """``size`` as a number, in which the order of the elements does not matter."""
    if not isinstance(size, Size) or not any(isinstance(each, _Interleaved) for each in size.symbols):
        return size
    others = tuple(each for each in size.symbols if not isinstance(each, _Interleaved))
    return times(times(Size(size.factor, others) if others else size.factor, BATCH), outer_of(size))


def symbol(name: str) -> Size:
    """A size that is equal for all requests of a batch."""
    return Size(1, (f"#{name}",))


def depends_on_batch(number: Number) -> bool:
    return isinstance(number, Size) and number.batch > 0


def result(operation: str, *operands: Number) -> Size:
    """The result of an operation that is not computed here, as a symbol."""
    text = f"{operation}({', '.join(map(repr, operands))})"
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return Size(1, (f"{_BATCH if any(map(depends_on_batch, operands)) else '#'}:{digest}",))


def times(first: Number, second: Number) -> Number:
    for one, other in ((first, second), (second, first)):
        if not isinstance(one, Size) and one == 1:
            return other
    if _is_exact(first, second):
        return first * second
    if any(isinstance(each, float) and not each.is_integer() for each in (first, second)):
        return result("*", *sorted((first, second), key=repr))
    (factor, symbols), (another, more) = _parts(first), _parts(second)
    product = int(factor * another)
    return Size(product, tuple(sorted(symbols + more))) if product else 0


def product(numbers: Any) -> Number:
    total: Number = 1
    for number in numbers:
        total = times(total, number)
    return total


def quotient(first: Number, second: Number) -> Number | None:
    """The exact quotient; None if it is not known to be one."""
    (factor, symbols), (divisor, others) = _parts(first), _parts(second)
    left = list(symbols)
    for each in others:
        if each not in left:
            return None
        left.remove(each)
    if not divisor or factor % divisor:
        return None
    whole = int(factor // divisor)
    return Size(whole, tuple(left)) if left and whole else whole


def plus(first: Number, second: Number) -> Number:
    if _is_exact(first, second):
        return first + second
    (factor, symbols), (another, more) = _parts(first), _parts(second)
    if not factor or not another:
        return first if factor else second
    if symbols == more and not any(isinstance(each, float) for each in (first, second)):
        return Size(factor + another, symbols) if factor + another else 0
    return result("+", *sorted((first, second), key=repr))


def minus(first: Number, second: Number) -> Number:
    return plus(first, times(-1, second))


def divide(first: Number, second: Number) -> Number:
    """As ONNX divides: integers are rounded towards zero."""
    if _is_exact(first, second) and second:
        if isinstance(first, int) and isinstance(second, int):
            whole = abs(first) // abs(second)
            return whole if (first < 0) == (second < 0) else -whole
        return first / second if (first / second).is_integer() else result("/", first, second)
    if all(isinstance(each, int | Size) for each in (first, second)) and second != 0:
        exact = quotient(first, second)
        if exact is not None:
            return exact
    elif second == 1:
        return first
    return result("/", first, second)


def modulo(first: Number, second: Number) -> Number:
    if isinstance(first, int) and isinstance(second, int) and second:
        return first % second
    return result("%", first, second)


def rounded(first: Number, how: Callable[[float], int] = math.floor) -> Number:
    """A float as an integral float."""
    if isinstance(first, float) and math.isfinite(first):
        return float(how(first))
    return first if first == BATCH or isinstance(first, int) else result(f"round {how.__name__}", first)


def to_integer(number: Number) -> Number:
    if isinstance(number, float):
        return int(number) if math.isfinite(number) else result("int", number)
    return number if isinstance(number, int) or number == BATCH else result("int", number)


def to_float(number: Number) -> Number:
    if isinstance(number, int | float):
        return float(number) if abs(number) <= _MAX_EXACT else result("float", number)
    return number if number == BATCH else result("float", number)


def equal(first: Number, second: Number) -> Number:
    """1, 0, or a symbol. Sizes are positive, or at least not negative."""
    if isinstance(first, int | float) and isinstance(second, int | float):
        return int(first == second)
    if first == second:
        return 1
    for one, other in ((first, second), (second, first)):
        if isinstance(one, Size) and isinstance(other, int | float) and one.factor > 0 > other and not one.computed:
            return 0
    return result("=", *sorted((first, second), key=repr))


def compare(operation: str, how: Callable[[Any, Any], bool]) -> Callable[[Number, Number], Number]:
    def compared(first: Number, second: Number) -> Number:
        if isinstance(first, int | float) and isinstance(second, int | float):
            return int(how(first, second))
        return result(operation, first, second)

    return compared


def choose(condition: Number, first: Number, second: Number) -> Number:
    if isinstance(condition, Size):
        return first if first == second else result("where", condition, first, second)
    return first if condition else second


def _parts(number: Number) -> tuple[Any, tuple[str, ...]]:
    return (number.factor, number.symbols) if isinstance(number, Size) else (number, ())


def _is_exact(*numbers: Number) -> bool:
    """Whether all are integers, or floats with which FP32 computes exactly."""
    return all(
        isinstance(each, int) or (isinstance(each, float) and each.is_integer() and abs(each) < 1 << 12)
        for each in numbers
    )
