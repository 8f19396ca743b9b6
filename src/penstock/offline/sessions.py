"""Models loaded into an engine for as long as they are needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.tensor import Signature

_AS_WRITTEN = {"graph_level": "disabled", "arena": False}


@contextlib.contextmanager
def loaded(
    artifact: Artifact, threads: int = 1, *, as_written: bool = False, engine: str = "onnxruntime"
) -> Iterator[LoadedModel]:
    """``artifact`` ready to run, unloaded at the end.

    With ``as_written`` ONNX Runtime rewrites nothing, so that every tensor is the graph's own, and keeps no memory that a large
    batch took. Raises InvalidModel or EngineUnavailable if the model does not load.
    """
    model = get_engine(engine).load(artifact, {"threads": threads, **(_AS_WRITTEN if as_written else {})})
    try:
        yield model
    finally:
        model.unload()


def signature_of(artifact: Artifact) -> Signature:
    """The inputs and outputs of ``artifact``. Raises InvalidModel if ONNX Runtime refuses it."""
    with loaded(artifact, as_written=True) as model:
        return model.signature


def call_rows(signature: Signature, rows: int) -> int:
    """Samples in a call: ``rows``, or the fixed number that the model takes."""
    return rows if signature.batchable else signature.smallest_batch
