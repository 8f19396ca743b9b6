"""Sizes of axes as products of an integer and symbols, and the arithmetic that models use to compute shapes.

A number is an ``int``, a ``float`` or a ``Size``. One symbol is the batch size. Every other symbol stands for a number that is equal
for all requests that can be merged. Operations other than products return a new symbol, which identifies the operation and its
operands. Equal symbols therefore stand for equal numbers.

Numbers that a model rounds, or that can overflow, are opaque: their symbols are never simplified, because ``x * 3 / 3`` may differ
from ``x``. All floats are opaque, and so are integers that may need more than 32 bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

Number = Any
"""``int | float | Size``."""

_BATCH = "N"
_OPAQUE, _COMPUTED = ".", ":"
"""The second character of a computed symbol, which shows whether the symbol is opaque."""
_MAX_INTEGER = 1 << 31
"""The limit of 32-bit integers, the narrowest integers with which a model may compute sizes."""
_MAX_FACTOR = 1 << 24
"""The maximum factor of a size. It leaves room for the values of the size's symbols."""
_MAX_EXACT = 1 << 12
"""Products of integers up to this value are exact in FP32."""


class _Interleaved(str):
    """A symbol for ``outer`` times the batch size. An axis of this size runs through all rows ``outer`` times."""

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
        """0: does not depend on the batch size. 1: a multiple of the batch size. 2: depends on the batch size in another way."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.factor == other.factor and self.symbols == other.symbols

    def __hash__(self) -> int:
        return hash((self.factor, self.symbols))

    def __repr__(self) -> str:
        return "*".join([str(self.factor), *map(repr, self.symbols)])

    @property
    def computed(self) -> list[str]:
        """The computed symbols. All other symbols are sizes of axes, which are not negative."""
        return [each for each in self.symbols if each[1:2] in {_COMPUTED, _OPAQUE}]

    @property
    def is_opaque(self) -> bool:
        return any(each[1:2] == _OPAQUE for each in self.symbols)


BATCH = Size(1, (_BATCH,))
_FLOAT_BATCH = Size(1, (f"{_BATCH}{_OPAQUE}",))
"""The batch size as a float."""


def interleaved(outer: Number, inner: Number) -> Number:
    """The size of a batch axis that runs ``outer`` times through all rows, with ``inner`` elements per row."""
    if outer == 1:
        return times(inner, BATCH)
    name = _Interleaved(f"{_BATCH}|{outer!r}")
    name.outer = outer
    return times(inner, Size(1, (name,)))


def outer_of(size: Number) -> Number:
    """The number of times that a batch axis runs through all rows."""
    symbols = size.symbols if isinstance(size, Size) else ()
    return next((each.outer for each in symbols if isinstance(each, _Interleaved)), 1)


def plain(size: Number) -> Number:
    """``size`` without the information how its axis interleaves rows. Other sizes are unchanged."""
    if not isinstance(size, Size) or not any(isinstance(each, _Interleaved) for each in size.symbols):
        return size
    others = tuple(each for each in size.symbols if not isinstance(each, _Interleaved))
    return times(times(Size(size.factor, others) if others else size.factor, BATCH), outer_of(size))


def symbol(name: str) -> Size:
    """A size that is equal for all requests of a batch."""
    return Size(1, (f"#{name}",))


def depends_on_batch(number: Number) -> bool:
    return isinstance(number, Size) and number.batch > 0


def result(operation: str, *operands: Number, kind: str = _COMPUTED) -> Size:
    """A symbol for the result of an operation that this module does not compute."""
    text = f"{operation}({', '.join(map(repr, operands))})"
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return Size(1, (f"{_BATCH if any(map(depends_on_batch, operands)) else '#'}{kind}{digest}",))


def _opaque(operation: str, *operands: Number) -> Size:
    return result(operation, *operands, kind=_OPAQUE)


def is_opaque(number: Number) -> bool:
    return isinstance(number, float) or (isinstance(number, Size) and number.is_opaque)


def bounded(number: Number) -> Number:
    """``number`` as an element of a tensor; an opaque symbol if the number may overflow the tensor's type."""
    limit, factor = (_MAX_FACTOR, number.factor) if isinstance(number, Size) else (_MAX_INTEGER, number)
    return number if isinstance(number, float) or -limit <= factor < limit else _opaque("overflow", number)


def times(first: Number, second: Number) -> Number:
    for one, other in ((first, second), (second, first)):
        if not isinstance(one, Size) and one == 1:
            return other
    if _is_exact(first, second):
        return first * second
    if is_opaque(first) or is_opaque(second):
        return _opaque("*", *sorted((first, second), key=repr))
    (factor, symbols), (another, more) = _parts(first), _parts(second)
    product = factor * another
    return Size(product, tuple(sorted(symbols + more))) if product else 0


def product(numbers: Any) -> Number:
    total: Number = 1
    for number in numbers:
        total = times(total, number)
    return total


def quotient(first: Number, second: Number) -> Number | None:
    """The exact quotient; None if the division is not known to be exact."""
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
    for one, other in ((first, second), (second, first)):
        if not isinstance(one, Size) and one == 0:
            return other
    if is_opaque(first) or is_opaque(second):
        return _opaque("+", *sorted((first, second), key=repr))
    (factor, symbols), (another, more) = _parts(first), _parts(second)
    if symbols == more:
        return Size(factor + another, symbols) if factor + another else 0
    return result("+", *sorted((first, second), key=repr))


def minus(first: Number, second: Number) -> Number:
    return plus(first, times(-1, second))


def divide(first: Number, second: Number) -> Number:
    """The quotient by ONNX's rules, which round integers towards zero."""
    if isinstance(first, int) and isinstance(second, int) and second:
        whole = abs(first) // abs(second)
        return whole if (first < 0) == (second < 0) else -whole
    if second == 1:
        return first
    if is_opaque(first) or is_opaque(second) or second == 0:
        is_whole = _is_exact(first, second) and second != 0 and (first / second).is_integer()
        return first / second if is_whole else _opaque("/", first, second)
    exact = quotient(first, second)
    return result("/", first, second) if exact is None else exact


def modulo(first: Number, second: Number) -> Number:
    if isinstance(first, int) and isinstance(second, int) and second:
        return first % second
    return _opaque("%", first, second)


def rounded(first: Number, how: Callable[[float], int] = math.floor) -> Number:
    """The float ``first``, rounded by ``how`` to a float without a fraction."""
    if isinstance(first, float) and math.isfinite(first):
        return float(how(first))
    return first if first == _FLOAT_BATCH else _opaque(f"round {how.__name__}", first)


def to_integer(number: Number, bits: int = 64) -> Number:
    """``number`` cast to an integer of 32 or 64 bits."""
    if number == _FLOAT_BATCH:
        return BATCH
    if isinstance(number, int | float):
        is_whole = abs(number) < _MAX_INTEGER or (bits > 32 and isinstance(number, int))
        return int(number) if is_whole else _opaque(f"int{bits}", number)
    may_round = is_opaque(number) or (number.computed and bits == 32)
    return _opaque(f"int{bits}", number) if may_round else number


def to_float(number: Number, bits: int = 32) -> Number:
    """``number`` cast to a float of 32 or 64 bits."""
    if isinstance(number, int | float) and abs(number) <= _MAX_EXACT and float(number * _MAX_EXACT).is_integer():
        return float(number)
    return _FLOAT_BATCH if number in (BATCH, _FLOAT_BATCH) else _opaque(f"float{bits}", number)


def equal(first: Number, second: Number) -> Number:
    """1 if the numbers are equal, 0 if not, and a symbol if this is unknown. Assumes that sizes of axes are not negative."""
    if isinstance(first, int | float) and isinstance(second, int | float):
        return int(first == second)
    if first == second and not is_opaque(first):  # a float can be NaN
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


def extreme(how: Callable[[Any, Any], Number]) -> Callable[[Number, Number], Number]:
    """A function that returns the minimum or maximum of two numbers, according to ``how``."""

    def chosen(first: Number, second: Number) -> Number:
        if all(isinstance(each, int | float) and not math.isnan(each) for each in (first, second)):
            return how(first, second)
        return first if first == second else _opaque(how.__name__, *sorted((first, second), key=repr))

    return chosen


def choose(condition: Number, first: Number, second: Number) -> Number:
    if isinstance(condition, Size):
        return first if first == second else _opaque("where", condition, first, second)
    return first if condition else second


def _parts(number: Number) -> tuple[Any, tuple[str, ...]]:
    return (number.factor, number.symbols) if isinstance(number, Size) else (number, ())


def _is_exact(*numbers: Number) -> bool:
    """True if all numbers are integers, or floats for which FP32 arithmetic is exact."""
    return all(
        isinstance(each, int) or (isinstance(each, float) and each.is_integer() and abs(each) < _MAX_EXACT)
        for each in numbers
    )
