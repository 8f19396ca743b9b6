"""The table of operators, and the node description with which each operator is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from penstock.errors import Unsupported
from penstock.offline.compress.training.torch import Tensor

Run = Callable[..., Any]
"""``(node, *inputs) -> Tensor`` or a tuple of tensors. An omitted input is None."""


class Node(msgspec.Struct, frozen=True):
    """One node. Attributes are Python values: text as ``str``, tensors as numpy arrays."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    opset: int

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def ints(self, name: str, tensor: Tensor | None) -> list[int] | None:
        """Integers that are an input in newer opsets and an attribute in older opsets. None if both are absent."""
        return self.get(name) if tensor is None else ints(tensor)

    def unsupported(self, what: str) -> Unsupported:
        return Unsupported(
            f"'{self.outputs[0]}' ({self.op_type}): {what} cannot be trained",
            "use a compression method without training, or export the model without it",
        )


class Operator(NamedTuple):
    """The function that computes one type of operator, and the inputs that can be trained."""

    run: Run
    weights: frozenset[int]
    """Positions of inputs that always count as weights, even with a single element."""
    fixed: frozenset[int] | None
    """Positions of float inputs that are settings, not weights. None: no input can be trained."""


OPERATORS: dict[tuple[str, str], Operator] = {}
"""The operators by domain and type."""


def operator(
    *names: str, weights: tuple[int, ...] = (), fixed: tuple[int, ...] | None = (), domain: str = ""
) -> Callable[[Run], Run]:
    """Register a function for the operators called ``names``."""

    def register(run: Run) -> Run:
        entry = Operator(run, frozenset(weights), None if fixed is None else frozenset(fixed))
        OPERATORS.update({(domain, name): entry for name in names})
        return run

    return register


def call(function: Callable[..., Any], node: Node, *inputs: Tensor | None) -> Any:
    """Call ``function`` with the inputs, and with those attributes that are keyword-only parameters of ``function``."""
    keywords = getattr(function, "__kwdefaults__", None) or {}
    return function(*inputs, **{name: node.attributes[name] for name in keywords if name in node.attributes})


def table(
    functions: Mapping[str, Callable[..., Any]],
    how: Callable[..., Any] = call,
    *,
    weights: tuple[int, ...] = (),
    fixed: tuple[int, ...] | None = (),
) -> None:
    """Register several operators, each computed as ``how(function, node, *inputs)``."""
    for name, function in functions.items():
        operator(name, weights=weights, fixed=fixed)(partial(how, function))


def ints(tensor: Tensor) -> list[int]:
    """The elements of an integer tensor as Python numbers."""
    return [int(value) for value in tensor.reshape(-1).tolist()]
