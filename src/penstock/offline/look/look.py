"""Looks into a model: reads the file, tries the engines, and runs one plausible sample.

Each step runs in a child process with limited memory and time, because a file may be made to exhaust both. If a step fails, the
others still say what they can.

::

    file ─ read ─ try each engine ─ meanings, rows ─ run a sample ─ cost ─ ModelFacts
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import resource
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import msgspec

from penstock.artifact import Artifact, Format, format_of
from penstock.engines.registry import engines_for, get_engine
from penstock.errors import InvalidModel, NotFound, PenstockError, Unsupported
from penstock.inputs.meaning import Meaning
from penstock.inputs.meanings import meanings_of
from penstock.inputs.sizes import Shapes, shapes_to_try
from penstock.offline.apart import apart
from penstock.offline.look.cost import cost
from penstock.offline.look.facts import CostFacts, EngineFacts, FileFacts, ModelFacts, TensorFacts
from penstock.offline.synthetic import Accepted, accepted_shapes, samples, stacked
from penstock.resources import usable_memory
from penstock.rows.graph import OnnxModel, read_graph
from penstock.rows.proof import unproven
from penstock.tensor import Array, Signature, TensorSpec

T = TypeVar("T")
Source = Path | Artifact

_READERS = {
    Format.ONNX: "onnx",
    Format.OPENVINO_IR: "openvino",
    Format.TFLITE: "tflite",
    Format.SAVED_MODEL: "tensorflow",
    Format.TORCHSCRIPT: "torch",
    Format.EXPORTED_PROGRAM: "torch",
}
_PATIENCE_S = 30.0
_BYTES_PER_S = 10 << 20
_HASTE = 5
"""After a step that took too long, the next steps get this fraction of the time."""
_LEAST_BYTES = 3 << 30
_COPIES = 8
"""The child may use this many times the model's size, and at least ``_LEAST_BYTES``."""
_ROWS = 4


class Look(msgspec.Struct, frozen=True):
    """The facts about a model, and what is needed to make samples for it."""

    facts: ModelFacts
    signature: Signature | None
    meanings: dict[str, Meaning]


class _Trial(msgspec.Struct, frozen=True):
    """The result of loading a model into one engine."""

    signature: Signature | None
    reason: str = ""
    memory_bytes: int = 0


def look(source: Source, shown: str = "") -> Look:
    """Look into a model file or folder, or a model in memory. ``shown`` is the path in the command to type next.

    Raises NotFound, Unsupported if Penstock knows no such file, and InvalidModel if it cannot be read at all.
    """
    format, size_bytes = _format(source), _size_bytes(source)
    child = _Child(source, size_bytes)
    file = child.ask(_read, FileFacts())
    trials = {name: child.ask(functools.partial(_try, engine=name), _Trial(None)) for name in engines_for(format)}
    loads = [name for name, trial in trials.items() if trial.signature is not None]
    if child.failures and not loads:
        raise InvalidModel(f"'{Path(shown or str(source)).name}' cannot be read: {child.failures[0]}")
    signature = next((trials[name].signature for name in loads), file.signature)
    meanings: dict[str, Meaning] = {}
    dependent, accepted = "the types and shapes of its inputs and outputs are unknown", Accepted({})
    if signature is not None:
        known = child.ask(functools.partial(_understand, signature=signature), None)
        meanings, dependent = known if known is not None else (meanings_of(signature), "the graph cannot be examined")
        accepted = Accepted(next(shapes_to_try(signature, meanings, file.axes)))
        if loads:
            run = functools.partial(_run, engine=loads[0], meanings=meanings, axes=file.axes)
            accepted = child.ask(run, None) or Accepted({}, child.failures.pop())
    costs = (
        child.ask(functools.partial(_cost, shapes=accepted.shapes), CostFacts())
        if format is Format.ONNX
        else CostFacts()
    )
    engines = [_engine(name, trial, child.reasons.get(name, "")) for name, trial in trials.items()]
    name = shown or (str(source) if isinstance(source, Path) else source.file_name)
    facts = ModelFacts(
        model=Path(name).name,
        format=format.value,
        size_bytes=size_bytes,
        opsets=file.opsets,
        inputs=_described(_tensors(signature.inputs) if signature else file.inputs, meanings),
        outputs=_tensors(signature.outputs) if signature else file.outputs,
        axes=file.axes,
        operators=file.operators,
        parameters=file.parameters,
        weight_bytes=file.weight_bytes,
        quantised=file.quantised,
        certificate=file.certificate,
        dependent_rows=dependent,
        engines=tuple(engines),
        cost=costs,
        sample_shapes=accepted.shapes,
        sample_failure=accepted.failure if loads else "",
        next_command=next_command(format, name) if loads else "",
        has_rows=signature is not None and signature.has_rows,
        notes=tuple(dict.fromkeys((*file.notes, *child.failures))),
    )
    return Look(facts, signature, meanings)


def next_command(format: Format, path: str, data: str = "") -> str:
    """The command to type next for the model at ``path``, which an engine runs. ``data`` is a file with samples."""
    if format is not Format.ONNX:
        return f"penstock serve {shlex.quote(path)}"
    source = f"--calibrate {shlex.quote(data)}" if data else "--synthetic"
    return f"penstock build {shlex.quote(path)} {source} -o {shlex.quote(f'{Path(path).stem}.bundle')}"


def make_template(found: Look) -> dict[str, Array]:
    """Arrays for all inputs with a few plausible samples, which the first axis counts.

    Raises Unsupported if the inputs are unknown, or if the model rejects all samples.
    """
    if found.signature is None or not found.facts.sample_shapes:
        reason = found.facts.sample_failure or "the types and shapes of its inputs are unknown"
        raise Unsupported(f"no samples can be made for '{found.facts.model}': {reason}", "write the npz file yourself")
    shapes = found.facts.sample_shapes
    calls = list(samples(found.signature, found.meanings, dict(shapes), _ROWS))
    return stacked(calls, found.signature)


def _format(source: Source) -> Format:
    if isinstance(source, Artifact):
        return source.format
    if not source.exists():
        raise NotFound(f"no model file '{source}'", "check the path")
    format = format_of(source)
    if format is None or format is Format.PYTHON:
        what = "a Python model, which runs only in a server" if format else "not a model file that Penstock reads"
        raise Unsupported(f"'{source.name}' is {what}", "give an ONNX, OpenVINO, TensorFlow, TFLite or torch model")
    return format


def _size_bytes(source: Source) -> int:
    if isinstance(source, Artifact):
        return source.size_bytes
    with contextlib.suppress(OSError):
        if source.is_dir():
            return sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
        return source.stat().st_size
    return 0


def _tensors(specs: tuple[TensorSpec, ...]) -> tuple[TensorFacts, ...]:
    return tuple(TensorFacts(spec.name, spec.datatype.value, spec.shape) for spec in specs)


def _described(inputs: tuple[TensorFacts, ...], meanings: Mapping[str, Meaning]) -> tuple[TensorFacts, ...]:
    """The inputs with their meanings. Without ``meanings``, those follow from the types and shapes that are known."""
    if not meanings:
        meanings = meanings_of(Signature(tuple(spec for one in inputs if (spec := one.spec) is not None), ()))
    return tuple(
        msgspec.structs.replace(one, role=meanings[one.name].role.value, meaning=meanings[one.name].text)
        if one.name in meanings
        else one
        for one in inputs
    )


def _engine(name: str, trial: _Trial, failure: str) -> EngineFacts:
    return EngineFacts(name, trial.signature is not None, trial.reason or failure, trial.memory_bytes)


class _Child:
    """Asks the child process about one model, and collects the reasons of failures."""

    def __init__(self, source: Source, size_bytes: int) -> None:
        self.failures: list[str] = []
        """Failures of steps other than the trials of engines."""
        self.reasons: dict[str, str] = {}
        """By engine, why its trial ended the child process."""
        # The child keeps the model of the last path, which must therefore not depend on the current folder.
        self._source = source if isinstance(source, Artifact) else source.absolute()
        self._size_bytes = size_bytes
        self._patience_s = _PATIENCE_S + size_bytes / _BYTES_PER_S

    def ask(self, step: Callable[..., T], otherwise: Any) -> Any:
        """The result of ``step``, a function of the source; ``otherwise`` if it fails."""
        limit = max(_LEAST_BYTES, _COPIES * self._size_bytes)
        limit = min(limit, usable_memory() or limit)
        apart.call(_start)  # the time to start the process does not count
        start, patience_s = perf_counter(), self._patience_s
        try:
            return apart.call(_limited, limit, step, self._source, patience_s=patience_s)
        except PenstockError as error:
            if perf_counter() - start >= patience_s:
                self._patience_s /= _HASTE
            engine = getattr(step, "keywords", {}).get("engine", "")
            if engine and otherwise is not None:
                self.reasons[engine] = error.message
            else:
                self.failures.append(error.message)
            return otherwise


# The functions below run in the child process.


def _start() -> None:
    """Calling this imports this module."""


def _limited(limit_bytes: int, step: Callable[[Source], T], source: Source) -> T:
    """Run ``step`` with at most ``limit_bytes`` of memory in addition to what the process uses already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes if hard < 0 else min(limit_bytes, hard), hard))
    try:
        return step(source)
    except MemoryError:
        raise PenstockError(f"the model needs more than {limit_bytes >> 20} MiB of memory") from None
    except PenstockError as error:
        raise PenstockError(f"{error.message}" + (f"; {error.hint}" if error.hint else "")) from None
    except Exception as error:
        raise PenstockError(f"the model cannot be examined: {type(error).__name__}: {str(error)[:200]}") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _artifact(source: Source) -> Artifact:
    return source if isinstance(source, Artifact) else _from_file(source)


@functools.lru_cache(maxsize=1)
def _from_file(path: Path) -> Artifact:
    return Artifact.from_file(path)


def _read(source: Source) -> FileFacts:
    artifact = _artifact(source)
    try:
        reader = importlib.import_module(f"penstock.offline.look.{_READERS[artifact.format]}")
    except ImportError as error:
        return FileFacts(notes=(f"the file was not read: {error}",))
    found: FileFacts = reader.read(artifact)
    return found


def _try(source: Source, engine: str) -> _Trial:
    artifact = _artifact(source)
    runner = get_engine(engine)
    model = runner.load(artifact, {})
    try:
        return _Trial(model.signature, "", runner.estimate(artifact, {}).memory_bytes)
    finally:
        model.unload()


def _understand(source: Source, signature: Signature) -> tuple[dict[str, Meaning], str]:
    artifact = _artifact(source)
    return meanings_of(signature, _graph(artifact)), unproven(artifact, signature)


def _graph(artifact: Artifact) -> OnnxModel | None:
    if artifact.format is not Format.ONNX:
        return None
    with contextlib.suppress(ValueError):
        return read_graph(artifact.data)
    return None


def _run(source: Source, engine: str, meanings: Mapping[str, Meaning], axes: Mapping[str, tuple[str, ...]]) -> Accepted:
    model = get_engine(engine).load(_artifact(source), {"threads": 1})
    try:
        return accepted_shapes(model.forward, model.signature, meanings, axes)
    finally:
        model.unload()


def _cost(source: Source, shapes: Shapes) -> CostFacts:
    return cost(_artifact(source), shapes)
