"""A checked pipeline: the function that a pipeline bundle holds. ``penstock.pipeline.check`` makes it from a declaration."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidInput
from penstock.pipeline.graph import Graph, GraphPlan
from penstock.pipeline.python_step import PythonStep
from penstock.pipeline.steps.base import Step
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array, Signature, as_bytes


class ModelTraits(msgspec.Struct, frozen=True):
    """What a pipeline must know about one of its models."""

    signature: Signature
    max_batch: int = 1
    """Maximum number of items of one call; 1 if the rows of the model are not independent."""


class ModelStep(msgspec.Struct, frozen=True, eq=False):
    """A step that runs a model. The values of a pipeline have no batch axis; the tensors of the model may have one."""

    model: str
    signature: Signature
    batchable: bool = False
    """True if the items of several calls may be joined along the first axis of all tensors."""
    max_batch: int = 1
    with_batch: frozenset[str] = frozenset()
    """Inputs and outputs that have a batch axis."""

    def to_model(self, inputs: Mapping[str, Value]) -> dict[str, Array]:
        """The tensors of one item: values with a batch axis of 1 where the model has one. Text becomes BYTES.

        Raises InvalidInput if their shapes do not fit the model, so that it does so wherever the model runs.
        """
        tensors = {name: self._tensor(name, value) for name, value in inputs.items()}
        for spec in self.signature.inputs:
            if not spec.admits(shape := tensors[spec.name].shape):
                start = spec.name in self.with_batch
                wanted, found = list(spec.shape[start:]), list(shape[start:])
                raise InvalidInput(f"the model's input '{spec.name}' has the shape {wanted}, but the value has {found}")
        if self.signature.batchable and (rows := {len(one) for one in tensors.values()}) != {1}:
            if len(rows) > 1:
                raise InvalidInput(f"the model's inputs have different numbers of rows: {sorted(rows)}")
            if 0 in rows:
                raise InvalidInput("the values have no rows, but the model needs at least one")
        return tensors

    def from_model(self, outputs: Mapping[str, Array]) -> dict[str, Value]:
        """The values of one item: ``outputs`` without the batch axis. BYTES of one element become text."""
        return {name: _value(array[0] if name in self.with_batch else array) for name, array in outputs.items()}

    def _tensor(self, name: str, value: Value) -> Array:
        if isinstance(value, str | bytes):
            array = np.empty((), np.object_)
            array[()] = as_bytes(value)
        else:
            array = value
        return array[None] if name in self.with_batch else array


def _value(array: Any) -> Value:
    if isinstance(array, bytes):
        return array.decode(errors="replace")
    if array.dtype.kind == "O" and not array.ndim:
        return as_bytes(array.item()).decode(errors="replace")
    return array


class MapStep(msgspec.Struct, frozen=True, eq=False):
    """A step that runs ``inner`` for each element of a list. Its outputs are lists of the outputs of ``inner``.

    The inputs of the step are the list ``over`` and the values outside that ``inner`` reads, under their own names. ``inner`` has
    these inputs, and the element as ``as_``.
    """

    over: str
    as_: str
    inner: Function


Work = Step | ModelStep | MapStep | PythonStep


class Function(msgspec.Struct, frozen=True, eq=False, dict=True):
    """A checked pipeline."""

    name: str
    inputs: Mapping[str, ValueType]
    """Images and audio that arrive as files have the datatype BYTES."""
    outputs: Mapping[str, ValueType]
    graph: Graph
    work: Mapping[str, Work]
    """What each step runs, by the step's name."""
    types: Mapping[str, ValueType] = {}
    """The types of all values."""
    description: str = ""

    @functools.cached_property
    def plan(self) -> GraphPlan:
        """The plan for all outputs."""
        return self.graph.plan(tuple(self.outputs))

    @property
    def models(self) -> list[str]:
        """Names of the models that the steps run, including those of inner pipelines."""
        found = (inner for work in self.work.values() for inner in models_of(work))
        return list(dict.fromkeys(found))


def models_of(work: Work) -> list[str]:
    """Names of the models that ``work`` runs."""
    if isinstance(work, MapStep):
        return work.inner.models
    return [work.model] if isinstance(work, ModelStep) else []
