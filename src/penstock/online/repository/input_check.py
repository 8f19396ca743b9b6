"""The check of a request's inputs against a model's signature, prepared once so that it costs little per request."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NoReturn

from penstock.errors import InvalidArgument
from penstock.request import InferRequest
from penstock.tensor import DataType, Signature


class InputCheck:
    """Checks names, datatypes, shapes and batch size; ``max_rows``, of one request, None means that the model is not batchable."""

    def __init__(self, model_name: str, signature: Signature, max_rows: int | None) -> None:
        self._model_name = model_name
        self._signature = signature
        self._max_rows = max_rows
        self._outputs = frozenset(signature.output_names)
        first = 0 if max_rows is None else 1
        self._inputs = [
            (
                spec.name,
                spec.datatype.dtype,
                len(spec.shape),
                [(axis, size) for axis, size in enumerate(spec.shape) if size != -1],
            )
            for spec in signature.inputs
        ]
        # With all but the batch axis fixed, any two requests can be merged and need no comparing.
        self._mergeable = all(size != -1 for spec in signature.inputs for size in spec.shape[first:])

    def __call__(self, request: InferRequest) -> tuple[int, Hashable]:
        """``(rows, key)``: the batch size (1 if not batchable), and what must be equal for two requests to be merged.

        Raises InvalidArgument.
        """
        inputs = request.inputs
        if len(inputs) != len(self._inputs):
            self._explain(request)
        rows = -1
        for name, dtype, rank, fixed in self._inputs:
            array = inputs.get(name)
            if array is None or (array.dtype is not dtype and array.dtype != dtype):
                self._explain(request)
            shape = array.shape
            if len(shape) != rank:
                self._explain(request)
            for axis, size in fixed:
                if shape[axis] != size:
                    self._explain(request)
            if self._max_rows is not None:
                if rows == -1:
                    rows = shape[0]
                if shape[0] != rows or not 0 < rows <= self._max_rows:
                    self._explain(request)
        if request.outputs and not self._outputs.issuperset(request.outputs):
            self._explain(request)
        if self._max_rows is None:
            return 1, None
        return rows, None if self._mergeable else tuple(inputs[name].shape[1:] for name, *_ in self._inputs)

    def _explain(self, request: InferRequest) -> NoReturn:
        """Find what is wrong and say it in the words that clients of the protocol know."""
        raise InvalidArgument(f"[request id: {request.id or '<id_unknown>'}] {self._reason(request)}")

    def _reason(self, request: InferRequest) -> str:
        inputs, model = request.inputs, f"model '{self._model_name}'"
        names = self._signature.input_names
        for name in inputs:
            if name not in names:
                return f"unexpected inference input '{name}' for {model}; its inputs are {names}"
        if missing := [name for name in names if name not in inputs]:
            return (
                f"expected {len(names)} inputs but got {len(inputs)} inputs for {model}. Got input(s) {list(inputs)}, "
                f"but missing required input(s) {missing}. Please provide all required input(s)."
            )
        for spec in self._signature.inputs:
            got = DataType.from_numpy(inputs[spec.name].dtype)
            if got is not spec.datatype:
                return (
                    f"inference input '{spec.name}' data-type is '{got.value}', "
                    f"but {model} expects '{spec.datatype.value}'"
                )
            if not spec.admits(shape := inputs[spec.name].shape):
                return (
                    f"unexpected shape for input '{spec.name}' for {model}. "
                    f"Expected {list(spec.shape)}, got {list(shape)}; -1 stands for any size"
                )
        return self._batch_reason(request) or self._output_reason(request)

    def _batch_reason(self, request: InferRequest) -> str:
        if self._max_rows is None:
            return ""
        first = request.inputs[self._signature.inputs[0].name].shape[0]
        for name in self._signature.input_names:
            if request.inputs[name].shape[0] != first:
                return f"input '{name}' batch size does not match other inputs for '{self._model_name}'"
        if first > self._max_rows:
            return f"inference request batch-size must be <= {self._max_rows} for '{self._model_name}'"
        return f"inference request batch-size must be >= 1 for '{self._model_name}'" if first < 1 else ""

    def _output_reason(self, request: InferRequest) -> str:
        unknown = next(name for name in request.outputs if name not in self._outputs)
        return (
            f"unexpected inference output '{unknown}' for model '{self._model_name}'; "
            f"its outputs are {self._signature.output_names}"
        )
