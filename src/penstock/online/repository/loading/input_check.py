"""Checks a request's inputs against a model's signature. Most of the work is done once per model, so a check is fast."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import islice
from typing import NoReturn

from penstock.errors import InvalidArgument, quoted, shortened
from penstock.online.repository.config import ModelConfig
from penstock.request import InferRequest
from penstock.tensor import Array, DataType, TensorSpec

_LISTED = 8
"""Maximum number of input names in an error message."""


class InputCheck:
    """Checks names, datatypes, shapes and batch size against the completed ``config``.

    ``max_rows`` is the maximum number of rows in one request, if requests can be merged. Requests can be merged even if the shapes
    of their ragged inputs differ.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_rows: int,
        defaults: Sequence[TensorSpec] = (),
        unranked: Collection[str] = (),
    ) -> None:
        """``defaults`` are the inputs with a default value in the model. The configuration may omit them.

        ``unranked`` inputs accept any shape, unless the configuration sets their shape.
        """
        self._model_name = config.name
        self._signature = signature = config.client_signature
        self._max_rows = max_rows if config.batchable else None
        self._optional = frozenset(tensor.name for tensor in config.input if tensor.optional)
        self._outputs = frozenset(signature.output_names)
        self._defaults = {spec.name: spec for spec in defaults if spec.name not in signature.input_names}
        self._unranked = {spec.name for spec in signature.inputs if spec.name in unranked and not spec.shape}
        self._inputs = [
            (
                spec.name,
                spec.datatype.dtype,
                _fixed_tail(spec.shape),
                -1 if spec.name in self._unranked else len(spec.shape),
                [(axis, size) for axis, size in enumerate(spec.shape) if size != -1],
            )
            for spec in signature.inputs
        ]
        ragged = {tensor.name for tensor in config.input if tensor.allow_ragged_batch}
        # Two requests can be merged if their shapes are equal from this axis on.
        self._compared = [(spec.name, len(spec.shape) if spec.name in ragged else 1) for spec in signature.inputs]
        # If all these axes are fixed, any two requests can be merged.
        self._mergeable = not self._optional and all(
            size != -1
            for (_, first), spec in zip(self._compared, signature.inputs, strict=True)
            for size in spec.shape[first:]
        )

    def __call__(self, request: InferRequest) -> tuple[int, Hashable]:  # noqa: C901, PLR0912 - each call saved here counts
        """``(rows, key)``: the batch size (1 if the model is not batchable), and a key. Requests with equal keys can be merged.

        Raises InvalidArgument.
        """
        inputs, max_rows = request.inputs, self._max_rows
        rows, expected = -1, len(self._inputs)
        for name, dtype, tail, rank, fixed in self._inputs:
            array = inputs.get(name)
            if array is None or (array.dtype is not dtype and array.dtype != dtype):
                if array is None and name in self._optional:
                    expected -= 1
                    continue
                self._explain(request)
            shape = array.shape
            if shape[1:] != tail:
                if len(shape) != rank >= 0:
                    self._explain(request)
                for axis, size in fixed:
                    if shape[axis] != size:
                        self._explain(request)
            if max_rows is not None:
                if rows == -1:
                    rows = shape[0]
                    if not 0 < rows <= max_rows:
                        self._explain(request)
                elif shape[0] != rows:
                    self._explain(request)
        replaced = len(inputs) - expected
        if replaced and replaced != sum(map(self._replaces, inputs, inputs.values())):
            self._explain(request)
        if request.outputs and not self._outputs.issuperset(request.outputs):
            self._explain(request)
        if max_rows is None:
            return 1, None
        if rows == -1:
            self._explain(request)
        if replaced:
            return rows, object()  # such a value applies to the whole batch, so the request is not merged
        return rows, None if self._mergeable else self._key(inputs)

    def _replaces(self, name: str, array: Array) -> bool:
        """True if ``array`` replaces a default value."""
        spec = self._defaults.get(name)
        return spec is not None and array.dtype == spec.datatype.dtype and spec.admits(array.shape)

    def _key(self, inputs: Mapping[str, Array]) -> Hashable:
        return tuple([inputs[name].shape[first:] if name in inputs else None for name, first in self._compared])

    def _explain(self, request: InferRequest) -> NoReturn:
        """Raise InvalidArgument with the reason why ``request`` is invalid, worded as in Triton."""
        raise InvalidArgument(f"[request id: {shortened(request.id) or '<id_unknown>'}] {self._reason(request)}")

    def _reason(self, request: InferRequest) -> str:
        inputs, model = request.inputs, f"model '{self._model_name}'"
        names = self._signature.input_names
        for name, spec in self._defaults.items():
            if name in inputs and not self._replaces(name, inputs[name]):
                given = f"{DataType.from_numpy(inputs[name].dtype).value} {list(inputs[name].shape)}"
                return f"input '{name}' of {model} must be {spec.datatype.value} {list(spec.shape)}, got {given}"
        for name in inputs:
            if name not in names and name not in self._defaults:
                return f"unexpected inference input {quoted(name)} for {model}; its inputs are {names}"
        missing = [name for name in names if name not in inputs and name not in self._optional]
        if missing or (not inputs and self._max_rows is not None):
            listed = [shortened(name) for name in islice(inputs, _LISTED)]
            return (
                f"expected {self._expected()} but got {len(inputs)} inputs for {model}. Got input(s) {listed}, "
                f"but missing required input(s) {missing}. Please provide all required input(s)."
            )
        specs = [spec for spec in self._signature.inputs if spec.name in inputs]
        for spec in specs:
            got = DataType.from_numpy(inputs[spec.name].dtype)
            if got is not spec.datatype:
                return (
                    f"inference input '{spec.name}' data-type is '{got.value}', "
                    f"but {model} expects '{spec.datatype.value}'"
                )
            if not spec.admits(shape := inputs[spec.name].shape) and spec.name not in self._unranked:
                return (
                    f"unexpected shape for input '{spec.name}' for {model}. "
                    f"Expected {list(spec.shape)}, got {list(shape)}; -1 stands for any size"
                )
        return self._batch_reason(request, [spec.name for spec in specs]) or self._output_reason(request)

    def _batch_reason(self, request: InferRequest, names: Sequence[str]) -> str:
        if self._max_rows is None:
            return ""
        first = request.inputs[names[0]].shape[0]
        for name in names:
            if request.inputs[name].shape[0] != first:
                return f"input '{name}' batch size does not match other inputs for '{self._model_name}'"
        if first > self._max_rows:
            return f"inference request batch-size must be <= {self._max_rows} for '{self._model_name}'"
        return f"inference request batch-size must be >= 1 for '{self._model_name}'" if first < 1 else ""

    def _expected(self) -> str:
        most, least = len(self._inputs), len(self._inputs) - len(self._optional)
        return f"number of inputs between {least} and {most}" if least < most else f"{most} inputs"

    def _output_reason(self, request: InferRequest) -> str:
        unknown = next(name for name in request.outputs if name not in self._outputs)
        return (
            f"unexpected inference output {quoted(unknown)} for model '{self._model_name}'; "
            f"its outputs are {self._signature.output_names}"
        )


def _fixed_tail(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dimensions after the first, if only the first dimension is free; otherwise None. Equal dimensions fit."""
    return shape[1:] if len(shape) > 1 and shape[0] == -1 and -1 not in shape[1:] else None
