"""Sessions: models loaded into an engine for a ``with`` block. During a build they are cached and shared (``model_store.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from penstock.artifact import Artifact, Format
from penstock.engines.base import LoadedModel, Options
from penstock.engines.registry import get_engine
from penstock.inputs.hints import hints_for
from penstock.inputs.meanings import meanings_of
from penstock.inputs.missing import takes_missing
from penstock.offline.model_store import borrowed, remembered
from penstock.rows.graph import read_graph
from penstock.rows.proof import coupling
from penstock.samples.hints import InputHints
from penstock.tensor import Array, Signature

_AS_WRITTEN = {"graph_level": "disabled", "arena": False}


@contextlib.contextmanager
def session(artifact: Artifact, engine: str, options: Options) -> Iterator[LoadedModel]:
    """Load ``artifact`` into ``engine`` with exactly these options. Raises InvalidModel or EngineUnavailable."""
    runner = get_engine(engine)
    key = artifact.digest, artifact.path, engine, repr(sorted(options.items()))
    size_bytes = runner.estimate(artifact, options).memory_bytes
    with borrowed(key, lambda: runner.load(artifact, options), size_bytes) as model:
        remembered("signature", artifact.digest, lambda: model.signature, 0)
        yield model


@contextlib.contextmanager
def loaded(
    artifact: Artifact, threads: int = 1, *, as_written: bool = False, engine: str = "onnxruntime"
) -> Iterator[LoadedModel]:
    """``artifact``, loaded and ready to run. Raises the errors of ``session``.

    With ``as_written``, ONNX Runtime does not optimise the graph, so that every tensor of the file exists. ONNX Runtime also releases
    memory after each large batch.
    """
    with session(artifact, engine, {"threads": threads, **(_AS_WRITTEN if as_written else {})}) as model:
        yield model


def signature_of(artifact: Artifact) -> Signature:
    """The inputs and outputs of ``artifact``. Raises InvalidModel if ONNX Runtime cannot load it."""

    def read() -> Signature:
        with loaded(artifact, as_written=True) as model:
            return model.signature

    return remembered("signature", artifact.digest, read, 0)


@contextlib.contextmanager
def hints_of(artifact: Artifact) -> Iterator[InputHints]:
    """What names, shapes and the graph show about the inputs of ``artifact``. Raises InvalidModel."""
    graph = read_graph(artifact.data) if artifact.format is Format.ONNX else None
    with loaded(artifact) as model:
        yield hints_for(meanings_of(model.signature, graph), model.forward, takes_missing(artifact))


class Overridden(LoadedModel):
    """Wraps a loaded model. Every call passes ``values`` for the optional inputs, and returns only the outputs in ``signature``."""

    reentrant = True

    def __init__(self, model: LoadedModel, values: Mapping[str, Array], signature: Signature | None = None) -> None:
        self.signature = signature or model.signature
        self._model, self._values = model, values

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        outputs = self._model.forward({**inputs, **self._values})
        return {name: outputs[name] for name in self.signature.output_names}

    def unload(self) -> None:
        self._model.unload()


def coupling_of(artifact: Artifact, signature: Signature) -> str:
    """``coupling`` of the model's rows. Within a build, each model is examined once."""
    return remembered("coupling", (artifact.digest, signature), lambda: coupling(artifact, signature), 0)


def call_rows(signature: Signature, rows: int) -> int:
    """Number of samples per call: ``rows``, or the model's fixed batch size."""
    return rows if signature.batchable else signature.smallest_batch
