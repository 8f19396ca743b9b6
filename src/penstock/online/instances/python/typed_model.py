"""Typed models: a function or class marked with ``@penstock.model``, served in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from penstock.engines.base import LoadedModel
from penstock.errors import InvalidModel, PenstockError, Unavailable
from penstock.online.instances.python.host import Stages, here
from penstock.online.instances.python.module import in_brief, log, reason
from penstock.online.instances.python.options import PythonOptions
from penstock.online.instances.python.tensors import check_output, check_rows, rows_of
from penstock.online.instances.python.typed import by_name, read_form
from penstock.request import InferRequest, Outcome
from penstock.tensor import Array, Signature


class Context:
    """What a typed model knows of itself, and may ask of the server."""

    def __init__(self, options: PythonOptions, folder: Path, stages: Stages) -> None:
        self.name = options.name
        self.version = options.version
        self.instance = options.instance
        self.folder = folder
        """Where ``model.py`` is."""
        self.parameters = options.parameters
        """Of the configuration."""
        self.config = options.config
        self._stages = stages

    def stage(self, name: str) -> AbstractContextManager[None]:
        """What runs within is shown in the model's statistics as the stage ``name``."""
        return self._stages.stage(name)

    def infer(self, model: str, inputs: Mapping[str, Array], outputs: Sequence[str] = ()) -> dict[str, Array]:
        """The outputs of another model on this server; waits. Raises PenstockError."""
        replies: SimpleQueue[Outcome] = SimpleQueue()
        here.ask(InferRequest(model, dict(inputs), outputs=tuple(outputs)), replies.put, False)
        reply = replies.get()
        if isinstance(reply, PenstockError):
            raise reply
        return reply.outputs


class TypedModel(LoadedModel):
    """A typed model in memory."""

    def __init__(
        self, run: Callable[..., Any], signature: Signature, unload: Callable[[], object], batches: bool
    ) -> None:
        self._run: Callable[..., Any] | None = run
        self.signature = signature
        self._unload = unload
        self._batches = batches
        """Whether it answers row for row."""

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self._run is None:
            raise Unavailable("the model has been unloaded")
        try:
            return self._checked(self._run(**inputs), rows_of(inputs) if self._batches else None)
        except PenstockError:
            raise
        except BaseException as error:  # also an exit: it is the model's
            raise self._failed(error) from None

    def unload(self) -> None:
        if self._run is not None:
            self._run = None
            try:
                self._unload()
            except BaseException as error:
                self._failed(error)

    def _checked(self, result: Any, rows: int | None) -> dict[str, Array]:
        try:
            outputs = by_name(result, self.signature)
        except ValueError as error:
            raise PenstockError(f"the model's answer is wrong: {in_brief(str(error))}") from None
        for spec in self.signature.outputs:
            check_output(spec, outputs[spec.name])
            check_rows(spec.name, outputs[spec.name], rows)
        return outputs

    def _failed(self, error: BaseException) -> PenstockError:
        log(error)
        return PenstockError(f"the model failed: {reason(error)}")


def load_typed(found: Any, options: PythonOptions, context: Context) -> TypedModel:
    """Load ``found``, a marked function or class. Raises InvalidModel, and what the model raises."""
    run, unload = found, _nothing
    if isinstance(found, type):
        one = found()
        run = getattr(one, "forward", None)
        if not callable(run):
            raise InvalidModel(f"class '{found.__name__}' has no function 'forward'", "add 'def forward(self, …)'")
        unload = getattr(one, "unload", _nothing)
        if callable(getattr(one, "load", None)):
            one.load(context)
    form = read_form(run, Signature(options.inputs, options.outputs), Context)
    if form.context:
        run = _with(run, form.context, context)
    return TypedModel(run, form.signature, unload, form.signature.batchable and options.max_batch != 0)


def _with(run: Callable[..., Any], name: str, context: Context) -> Callable[..., Any]:
    return lambda **inputs: run(**inputs, **{name: context})


def _nothing() -> None:
    """A model need not unload anything."""
