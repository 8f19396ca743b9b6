"""The table of operators, and what an operator is told about its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from penstock.errors import Unsupported
from penstock.offline.compress.training.torch import Tensor

Run = Callable[..., Any]
"""``(node, *inputs) -> Tensor``, or a tuple of them; an input that is left out is None."""


class Norms(msgspec.Struct):
    """Where BatchNormalization takes its statistics from; one for all nodes of a model."""

    from_batch: bool = False
    """Whether from the batch, the running statistics being updated, or from the running statistics."""
    share: float | None = None
    """The batch's share in the updated running statistics; None takes the node's ``momentum``."""


class Node(msgspec.Struct, frozen=True):
    """One node: its attributes as Python values, text as ``str`` and tensors as numpy arrays."""

    op_type: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    opset: int
    norms: Norms

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def unsupported(self, what: str) -> Unsupported:
        return Unsupported(
            f"'{self.outputs[0]}' ({self.op_type}): {what} cannot be trained",
            "compress the model by the methods that need no training, or export it without",
        )


class Operator(NamedTuple):
    """How to compute one type of operator, and which of its inputs may be trained."""

    run: Run
    weights: frozenset[int]
    """Positions of inputs that are weights whatever their size."""
    fixed: frozenset[int] | None
    """Positions of float inputs that are settings, not weights; None if no input of the operator can be trained."""


OPERATORS: dict[tuple[str, str], Operator] = {}
"""By domain and type."""


def operator(
    *names: str, weights: tuple[int, ...] = (), fixed: tuple[int, ...] | None = (), domain: str = ""
) -> Callable[[Run], Run]:
    """Register a function for the operators called ``names``."""

    def register(run: Run) -> Run:
        entry = Operator(run, frozenset(weights), None if fixed is None else frozenset(fixed))
        OPERATORS.update({(domain, name): entry for name in names})
        return run

    return register


def table(functions: dict[str, Callable[..., Tensor]], fixed: tuple[int, ...] | None = ()) -> None:
    """Register functions of the inputs alone, without attributes."""

    def ignoring_node(function: Callable[..., Tensor]) -> Run:
        return lambda _node, *inputs: function(*inputs)

    for name, function in functions.items():
        operator(name, fixed=fixed)(ignoring_node(function))


def ints(tensor: Tensor) -> list[int]:
    """The elements of an integer tensor as Python numbers."""
    return [int(value) for value in tensor.reshape(-1).tolist()]
