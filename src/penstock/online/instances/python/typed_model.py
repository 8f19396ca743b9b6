"""Typed models: a function or class marked with ``@penstock.model``, served in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from penstock.engines.base import Answer
from penstock.errors import InvalidModel, PenstockError
from penstock.online.instances.python.host import StageTimes, here
from penstock.online.instances.python.module import in_brief, log, reason
from penstock.online.instances.python.options import PythonOptions
from penstock.online.instances.python.tensors import check_output, check_rows, rows_of
from penstock.online.instances.python.typed import by_name, read_form
from penstock.online.scheduler.layout import merge, split
from penstock.request import InferRequest
from penstock.tensor import Array, Signature


class Context:
    """Information about a typed model, and its access to the server."""

    def __init__(self, options: PythonOptions, folder: Path, stages: StageTimes) -> None:
        self.name = options.name
        self.version = options.version
        self.instance = options.instance
        self.folder = folder
        """The folder of ``model.py``."""
        self.parameters = options.parameters
        """The ``parameters`` of the configuration."""
        self.config = options.config
        self._stages = stages

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Add the duration of the ``with`` block to the stage ``name`` in the model's statistics."""
        return self._stages.stage(name)

    def infer(self, model: str, inputs: Mapping[str, Array], outputs: Sequence[str] = ()) -> dict[str, Array]:
        """Call another model of this server and wait for its outputs. Raises PenstockError."""
        reply = here.wait_for(InferRequest(model, dict(inputs), outputs=tuple(outputs)))
        if isinstance(reply, PenstockError):
            raise reply
        return reply.outputs


class TypedModel:
    """A typed model in memory, a ``RequestModel``."""

    reentrant = False
    decoupled = False

    def __init__(
        self, run: Callable[..., Any], signature: Signature, unload: Callable[[], object], row_wise: bool
    ) -> None:
        self._run = run
        self.signature = signature
        self.max_batch = None if signature.batchable else 0
        self._unload = unload
        self._row_wise = row_wise
        """True if the outputs must have a row for each row of the inputs."""

    def execute(self, requests: Sequence[InferRequest], answer: Answer) -> None:
        """Run ``requests`` as one batch. If the batch fails, run each request alone, so that only faulty requests fail."""
        try:
            outputs = self._forward(merge([request.inputs for request in requests]))
            parts = [outputs]
            if len(requests) > 1:
                parts = split(outputs, [len(next(iter(request.inputs.values()))) for request in requests])
        except PenstockError:
            if len(requests) == 1:
                raise
            for number, request in enumerate(requests):
                try:
                    answer(number, self._forward(request.inputs), True)
                except PenstockError as error:
                    answer(number, error, True)
        else:
            for number, part in enumerate(parts):
                answer(number, part, True)

    def unload(self) -> None:
        try:
            self._unload()
        except BaseException as error:
            log(error)

    def _forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        try:
            result = self._run(**inputs)
        except PenstockError:
            raise
        except BaseException as error:  # SystemExit too: the model raised it
            log(error)
            raise PenstockError(f"the model failed: {reason(error)}") from None
        try:
            outputs = by_name(result, self.signature)
        except Exception as error:
            raise PenstockError(f"the model's result is wrong: {in_brief(str(error))}") from None
        rows = rows_of(inputs) if self._row_wise else None
        for spec in self.signature.outputs:
            check_output(spec, outputs[spec.name])
            check_rows(spec.name, outputs[spec.name], rows)
        return outputs


def load_typed(found: Any, options: PythonOptions, context: Context) -> TypedModel:
    """Load ``found``, a marked function or class. Raises InvalidModel, and any exception of the model."""
    run, unload = found, _nothing
    if isinstance(found, type):
        model = found()
        run = getattr(model, "forward", None)
        if not callable(run):
            raise InvalidModel(f"class '{found.__name__}' has no function 'forward'", "add 'def forward(self, …)'")
        unload = getattr(model, "unload", _nothing)
        if callable(getattr(model, "load", None)):
            model.load(context)
    signature, context_name = read_form(run, Signature(options.inputs, options.outputs), Context)
    if context_name:
        run = partial(run, **{context_name: context})
    return TypedModel(run, signature, unload, signature.batchable and options.max_batch != 0)


def _nothing() -> None:
    """The default ``unload``."""
