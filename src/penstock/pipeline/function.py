"""A checked pipeline: the function that a pipeline bundle holds."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.pipeline.graph import Graph
from penstock.pipeline.steps.base import Step
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array, Signature


class ModelStep(msgspec.Struct, frozen=True, eq=False):
    """A step that runs a model."""

    model: str
    signature: Signature
    batchable: bool = False
    max_batch: int = 1
    with_batch: frozenset[str] = frozenset()

    def to_model(self, inputs: Mapping[str, Value]) -> dict[str, Array]:
        return {name: array[None] if name in self.with_batch else array for name, array in inputs.items()}

    def from_model(self, outputs: Mapping[str, Array]) -> dict[str, Value]:
        return {name: array[0] if name in self.with_batch else array for name, array in outputs.items()}


class Function(msgspec.Struct, frozen=True, eq=False):
    """A checked pipeline."""

    name: str
    inputs: Mapping[str, ValueType]
    outputs: Mapping[str, ValueType]
    graph: Graph
    work: Mapping[str, Step | ModelStep | MapStep]


class MapStep(msgspec.Struct, frozen=True, eq=False):
    """A step that runs ``inner`` for each element of the list ``over``."""

    over: str
    as_: str
    inner: Function
