"""The compression methods as functions: ``penstock.compress.prune(...)``."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.config import did_you_mean, field_docs
from penstock.offline.compress.job import Job, Model
from penstock.offline.compress.method import Method, OnProgress
from penstock.offline.compress.outcome import Outcome
from penstock.offline.compress.table import METHODS
from penstock.samples.open import Data


class CompressFunction(Protocol):
    """The type of the functions. The options depend on the method."""

    def __call__(
        self,
        model: Model,
        data: Data | None = None,
        evaluate: Data | None = None,
        output: str | os.PathLike[str] | None = None,
        *,
        force: bool = False,
        on_progress: OnProgress = ...,
        **options: Any,
    ) -> Outcome: ...


class CompressFunctions:
    """One function for each method of the table::

        outcome = penstock.compress.quantize("model.onnx", "train.npz", evaluate="test.npz", output="int8.onnx")

    The parameters are ``(model, data=None, evaluate=None, output=None, *, force=False, on_progress=None, **options)``. ``model`` is an
    ONNX file or an ``Artifact``. The method uses ``data``; the result is measured on ``evaluate``. Both are samples of any kind (see
    ``samples/open.py``). ``output`` is a file to write. The options are those of the command with the same name. Methods are imported
    on first use.
    """

    distill: CompressFunction
    low_rank: CompressFunction
    prune: CompressFunction
    prune_channels: CompressFunction
    qat: CompressFunction
    quantize: CompressFunction
    sensitivity: CompressFunction
    share: CompressFunction

    if not TYPE_CHECKING:  # otherwise type checkers would accept every name

        def __getattr__(self, name: str) -> CompressFunction:
            if name.replace("_", "-") not in METHODS:
                raise AttributeError(f"there is no compression method '{name}': {did_you_mean(name, dir(self))}")
            method = METHODS[name.replace("_", "-")].load()
            return _function(name, method)

    def __dir__(self) -> list[str]:
        return [name.replace("-", "_") for name in METHODS]


def _function(name: str, method: type[Method]) -> CompressFunction:
    def run(
        model: Model,
        data: Data | None = None,
        evaluate: Data | None = None,
        output: str | os.PathLike[str] | None = None,
        *,
        force: bool = False,
        on_progress: OnProgress = lambda *_: None,
        **options: Any,
    ) -> Outcome:
        given = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in options.items()}
        return Job(method.make(given), model, data, evaluate, output, force=force).run(on_progress)

    docs = field_docs(method)
    fields = msgspec.structs.fields(method)
    run.__name__ = run.__qualname__ = name
    run.__doc__ = "\n".join(
        [inspect.getdoc(method) or "", "", *(f"{field.name}: {docs[field.name]}" for field in fields)]
    )
    shared = [one for one in inspect.signature(run).parameters.values() if one.kind is not one.VAR_KEYWORD]
    own = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.required else field.default,
        )
        for field in fields
    ]
    run.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    return run


compress = CompressFunctions()
