"""The table of rules, one per operator, and the argument of a rule: a node with the facts about its inputs.

A rule returns the facts about the outputs. The rule must also ensure what ``check`` cannot derive from shapes: the operator does not
combine elements along the batch axis of an input, and does not treat elements differently by their position on that axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from penstock.rows.facts import Fact, stop
from penstock.rows.graph import OnnxNode
from penstock.rows.sizes import Number, Size, depends_on_batch

Facts = list[Fact | None]
"""The facts about a node's outputs. None stands for an output that is unused, or that the proof must not use."""


class Call:
    """A ``node`` with the facts about its inputs. ``version`` is the opset version. ``unknowns`` yields new symbols."""

    def __init__(self, node: OnnxNode, version: int, inputs: Sequence[Fact | None], unknowns: Iterator[Size]) -> None:
        self.node = node
        self.operator = node.operator
        self.version = version
        self.inputs = inputs
        self.accounted: set[int] = set()
        """Inputs that ``check`` skips: the rule uses only their shape, or tracks the batch size in their elements."""
        self.makes_rows = False
        """True if the operator repeats a constant for each row."""
        self._unknowns = unknowns

    def __getitem__(self, position: int) -> Fact:
        found = self.get(position)
        return found if found is not None else stop(f"lacks input {position}")

    def get(self, position: int) -> Fact | None:
        return self.inputs[position] if position < len(self.inputs) else None

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.node.attributes.get(name, default)

    def unknown(self) -> Size:
        """An unknown size that is equal for all requests of a batch."""
        return next(self._unknowns)

    def constants(self, *positions: int) -> None:
        """Raise Dependent if an input at ``positions`` depends on the rows."""
        for position in positions:
            if (fact := self.get(position)) is not None and fact.is_rows:
                stop(f"has an input '{self.node.inputs[position]}' that depends on the rows")

    def singles(self, *positions: int) -> None:
        """Raise Dependent unless each input at ``positions`` is absent or a constant with one element."""
        for position in positions:
            if (fact := self.get(position)) is not None and not fact.is_single:
                stop(f"has more than one element in its input '{self.node.inputs[position]}'")

    def mixes(self, fact: Fact, *axes: int) -> None:
        """Raise Dependent if ``axes``, along which the operator combines elements, include the batch axis of ``fact``."""
        if fact.is_rows and any(axis % fact.rank == fact.axis for axis in axes):
            stop("mixes the rows of a batch")

    def numbers(self, position: int) -> list[Number]:
        """The elements of an input. Raises Dependent if an element depends on the batch size."""
        found = self.sizes(position)
        self.accounted.discard(position)
        if any(map(depends_on_batch, found)):
            stop("depends on the batch size")
        return found

    def sizes(self, position: int) -> list[Number]:
        """The elements of an input. Unlike in ``numbers``, elements may depend on the batch size."""
        value = self[position].value
        self.accounted.add(position)
        if value is None:
            stop(f"has an input '{self.node.inputs[position]}' that is not known before the request")
        return list(value.flat)

    def integers(self, name: str, position: int) -> list[int] | None:
        """A parameter that is an attribute in older versions of the operator and an input in newer versions; None if absent."""
        if (given := self.attribute(name)) is not None:
            return [given] if isinstance(given, int) else list(given)
        if self.get(position) is None:
            return None
        found = self.numbers(position)
        if not all(isinstance(each, int) for each in found):
            stop(f"has an input '{self.node.inputs[position]}' that is not known before the request")
        return found

    def axis(self, rank: int, default: int) -> int:
        """The attribute ``axis`` as a non-negative index."""
        return self.within(self.attribute("axis", default), rank)

    def within(self, axis: int, rank: int) -> int:
        """Convert ``axis``, which may be negative, to a non-negative index."""
        if not -rank <= axis < rank:
            stop(f"has axis {axis}, but {rank} axes")
        return axis % rank

    def check(self, outputs: Facts) -> None:
        """Raise Dependent if an output loses the rows or the batch size of an input, or has rows although no input has rows."""
        facts = [fact for fact in outputs if fact is not None]
        has_rows = False
        for position, fact in enumerate(self.inputs):
            if fact is None or position in self.accounted:
                continue
            has_rows |= fact.is_rows
            if fact.holds_batch_size and any(output.value is None for output in facts):
                stop("computes with the batch size")
        if has_rows and not all(output.is_rows for output in facts):
            stop("mixes the rows of a batch")
        if not has_rows and not self.makes_rows and any(output.is_rows for output in facts):
            stop("makes rows from a constant")


Rule = Callable[[Call], Fact | Facts]
RULES: dict[tuple[str, str], Rule] = {}
"""The rules by domain and operator."""
MICROSOFT = "com.microsoft"
CLASSICAL = "ai.onnx.ml"


def rule(*operators: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a function as the rule of ``operators``."""

    def register(function: Rule) -> Rule:
        RULES.update({(domain, operator): function for operator in operators})
        return function

    return register


def keeps_shape(
    *operators: str,
    mixed: Callable[[Call], Iterable[int]] = lambda call: (),
    constants: Sequence[int] = (),
    singles: Sequence[int] = (),
    domain: str = "",
) -> None:
    """Register a rule for ``operators`` whose output has the shape of their first input.

    The operators combine elements along the axes ``mixed``. The inputs ``constants`` must not depend on the rows. The inputs
    ``singles`` must have one element.
    """

    @rule(*operators, domain=domain)
    def keeps(call: Call) -> Fact:
        call.constants(*constants)
        call.singles(*singles)
        call.mixes(call[0], *mixed(call))
        return Fact(call[0].shape)


def after_first(call: Call) -> range:
    """All axes after the first."""
    return range(1, call[0].rank)
