"""Converts requests to the model's inputs, and the model's outputs to answers. Pure.

Requests are usually merged along the first axis. A configuration may change shapes (``reshape``), concatenate the elements of
requests with different shapes (``allow_ragged_batch``), and add inputs that describe the batch (``batch_input``). All three work
as in Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock.errors import PenstockError
from penstock.online.scheduler.queue import Pending
from penstock.tensor import Array

Shape = tuple[int, ...]


class BatchLayout(Protocol):
    """Conversion for one model. Any thread may use it."""

    @property
    def is_ragged(self) -> bool:
        """True if requests with equal keys may have different shapes."""
        ...

    def gather(self, requests: Sequence[Pending]) -> Mapping[str, Array]:
        """The model's inputs for ``requests``, which have the same key. The arrays may be the same objects as in the requests."""
        ...

    def scatter(self, requests: Sequence[Pending], outputs: dict[str, Array]) -> list[dict[str, Array]]:
        """The outputs of each of ``requests``, as views. Raises PenstockError if the outputs cannot be divided."""
        ...


def merge(inputs: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    """Concatenate the rows of all ``inputs``. The inputs must agree in names, datatypes and all dimensions except the first.

    The arrays of a single request are returned without a copy.
    """
    if len(inputs) == 1:
        return inputs[0]
    return {name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]}


def split(outputs: Mapping[str, Array], rows: Sequence[int]) -> list[dict[str, Array]]:
    """Divide every output into the ``rows`` of each request, as views that do not overlap.

    Raises PenstockError unless the outputs have one row for each row of the inputs.
    """
    total = sum(rows)
    for name, array in outputs.items():
        if array.shape[:1] != (total,):
            raise PenstockError(
                f"the model's output '{name}' has shape {list(array.shape)} for a batch of {total}",
                "serve the model with a maximum batch size of 1",
            )
    parts: list[dict[str, Array]] = []
    start = 0
    for count in rows:
        part = {}
        for name, array in outputs.items():
            part[name] = array[start : start + count]
        parts.append(part)
        start += count
    return parts


class MergedRows:
    """Merges requests along the first axis."""

    is_ragged = False

    def gather(self, requests: Sequence[Pending]) -> Mapping[str, Array]:
        return merge([pending.request.inputs for pending in requests])

    def scatter(self, requests: Sequence[Pending], outputs: dict[str, Array]) -> list[dict[str, Array]]:
        return split(outputs, [pending.rows for pending in requests])


class SingleRequest:
    """Runs every request alone, unchanged."""

    is_ragged = False

    def gather(self, requests: Sequence[Pending]) -> Mapping[str, Array]:
        return requests[0].request.inputs

    def scatter(self, requests: Sequence[Pending], outputs: dict[str, Array]) -> list[dict[str, Array]]:
        return [outputs]


class Reshape(msgspec.Struct, frozen=True):
    """The two shapes of a tensor: its shape for clients, and its shape for the model.

    Both shapes have the same number of free dimensions. If requests are merged, both shapes begin with the batch dimension.
    """

    client: Shape
    model: Shape

    def to_model(self, shape: Shape) -> Shape:
        return _fill(self.model, self.client, shape)

    def to_client(self, name: str, shape: Shape) -> Shape:
        """The client's shape of the model's output ``name``. Raises PenstockError if ``shape`` contradicts the configuration."""
        if len(shape) != len(self.model) or any(
            want not in (-1, got) for want, got in zip(self.model, shape, strict=True)
        ):
            raise PenstockError(
                f"the model's output '{name}' has shape {list(shape)}, but 'reshape' is for {list(self.model)}",
                "correct 'reshape' in the model's configuration",
            )
        return _fill(self.client, self.model, shape)


class MadeInput(msgspec.Struct, frozen=True):
    """An input that describes the batch."""

    kind: str
    targets: tuple[str, ...]
    source: str
    dtype: np.dtype[Any]

    def of(self, shapes: Sequence[Shape]) -> Array:
        """The value for a batch. ``shapes`` has the shape of the source input in each request."""
        return _MAKERS[self.kind](shapes).astype(self.dtype)


class ShapedRequests:
    """Extends the layout ``plain`` by ragged inputs, reshapes, inputs that describe the batch, and scattered outputs."""

    def __init__(
        self,
        plain: BatchLayout,
        ragged: frozenset[str],
        inputs: Mapping[str, Reshape],
        outputs: Mapping[str, Reshape],
        made: Sequence[MadeInput],
        scattered: Mapping[str, tuple[str, Shape]],
    ) -> None:
        self.is_ragged = bool(ragged)
        self._plain = plain
        self._ragged = ragged
        self._inputs, self._outputs = inputs, outputs
        self._made = made
        self._scattered = scattered
        """For each scattered output, its shape and the input that determines its free dimensions."""

    def gather(self, requests: Sequence[Pending]) -> Mapping[str, Array]:
        every = [pending.request.inputs for pending in requests]
        gathered: dict[str, Array] = {}
        for name in every[0]:
            arrays = [inputs[name] for inputs in every]
            if name in self._ragged:
                arrays = [array.reshape(-1) for array in arrays]
            whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            if name in self._inputs and name not in self._ragged:
                whole = whole.reshape(self._inputs[name].to_model(whole.shape))
            gathered[name] = whole
        for made in self._made:
            if made.source in every[0]:
                value = made.of(self._shapes(requests, made.source))
                gathered.update(dict.fromkeys(made.targets, value))
        return gathered

    def scatter(self, requests: Sequence[Pending], outputs: dict[str, Array]) -> list[dict[str, Array]]:
        by_rows: dict[str, Array] = {}
        for name, array in outputs.items():
            if name in self._outputs and name not in self._scattered:
                by_rows[name] = array.reshape(self._outputs[name].to_client(name, array.shape))
            elif name not in self._scattered:
                by_rows[name] = array
        parts = self._plain.scatter(requests, by_rows)
        for name, (source, shape) in self._scattered.items():
            if name in outputs:
                pieces = _pieces(name, outputs[name], shape, self._shapes(requests, source))
                for part, piece in zip(parts, pieces, strict=True):
                    part[name] = piece
        return parts

    def _shapes(self, requests: Sequence[Pending], name: str) -> list[Shape]:
        """The shape of the input ``name`` in each request, for the model."""
        reshape = self._inputs.get(name)
        shapes = [pending.request.inputs[name].shape for pending in requests]
        return [reshape.to_model(shape) for shape in shapes] if reshape is not None else shapes


def _fill(into: Shape, pattern: Shape, shape: Shape) -> Shape:
    """Fill the free dimensions of ``into``, in order. The sizes come from ``shape``, at the free dimensions of ``pattern``."""
    sizes = iter([size for size, want in zip(shape, pattern, strict=True) if want == -1])
    return tuple([next(sizes) if want == -1 else want for want in into])


def _pieces(name: str, array: Array, shape: Shape, sources: Sequence[Shape]) -> list[Array]:
    """Divide ``array`` into one piece for each of ``sources``. A piece has ``shape``, with the free dimensions of the source."""
    shapes = [tuple([source[axis] if want == -1 else want for axis, want in enumerate(shape)]) for source in sources]
    ends = np.cumsum([math.prod(one) for one in shapes])
    if ends[-1] != array.size:
        raise PenstockError(
            f"the model's output '{name}' has {array.size} elements, but the shapes of the inputs require {ends[-1]}",
            "correct 'batch_output' in the model's configuration",
        )
    return [piece.reshape(one) for piece, one in zip(np.split(array.reshape(-1), ends[:-1]), shapes, strict=True)]


def _counts(shapes: Sequence[Shape]) -> Array:
    return np.array([math.prod(shape) for shape in shapes], np.int64)


def _item_shapes(shapes: Sequence[Shape]) -> Array:
    """For each row of the batch, the shape of its item."""
    return np.concatenate([np.tile(np.array(shape[1:], np.int64), (shape[0], 1)) for shape in shapes])


_MAKERS: Mapping[str, Callable[[Sequence[Shape]], Array]] = {
    "BATCH_ELEMENT_COUNT": _counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes: np.cumsum(_counts(shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: np.cumsum([0, *_counts(shapes)]),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(_counts(shapes).max(), np.int8),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: _item_shapes(shapes).reshape(-1),
}
