"""Interfaces of engines: ``Engine`` validates and loads artifacts, and ``LoadedModel`` runs a model.

The constructor of a ``LoadedModel`` loads the model. ``forward`` may then be called until ``unload``. The tests in
``tests/conformance/engines.py`` check this contract for every engine.
"""

from __future__ import annotations

import abc
import enum
import functools
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import msgspec

from penstock.artifact import TITLES, Artifact, Format, listed
from penstock.errors import InvalidConfig, InvalidInput, InvalidModel, PenstockError
from penstock.protocol.onnx_scan import external_files
from penstock.request import InferRequest
from penstock.resources import MachineFacts, Resources, machine_facts, usable_cores
from penstock.tensor import Array, Signature, TensorSpec

Options = Mapping[str, Any]
"""Engine options by name, as in manifests and configurations. Each engine converts them to a typed struct."""

_Typed = TypeVar("_Typed", bound=msgspec.Struct)


_log = logging.getLogger(__name__)

_THREADS = ("threads", "inter_op_threads")
"""Options that are a number of threads. Thousands of threads take an engine minutes to start."""

_first_use = threading.Lock()
"""Serialises conversions by msgspec, which crashes if several threads use a type for the first time at once."""
_OF_SEVERAL_FILES = (Format.OPENVINO_IR, Format.SAVED_MODEL)
_ABOUT_INPUTS = re.compile(
    r"\b(?:axis|axes|bounds?|broadcast\w*|channels?|dim(?:ension)?s?|elements?|empty|exceeds?|ind(?:ex|exes|ice|ices)|length|"
    r"(?:mis)?match(?:ed)?|negative|overflow|range|rank|reshaped?|shapes?|sizes?|values?|zero)\b",
    re.IGNORECASE,
)
"""Words in the reason of an operator that rejects the values or sizes of its inputs."""
_ABOUT_MEMORY = re.compile(r"alloc|\bmemory\b", re.IGNORECASE)


class Severity(enum.Enum):
    """WARNING: the model loads, but with a limitation. ERROR: the model does not load."""

    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """A warning or an error that ``validate`` found."""

    severity: Severity
    message: str
    hint: str = ""


class LoadedModel(Protocol):
    """A model in memory, ready to run. Subclasses inherit conservative defaults."""

    signature: Signature
    reentrant: bool = False
    """True if several threads may run ``forward`` at the same time."""
    predictable: bool = False
    """True if ``forward`` never blocks, any thread may call it, and its run time depends only on the inputs' shapes. The server may
    run short batches of such a model on its event loop."""
    keeps_state: bool = False
    """True if outputs may depend on earlier calls. Such a model is not warmed up, and streams have no copies of it."""
    optional_inputs: tuple[TensorSpec, ...] = ()
    """Inputs that have a default value in the model. The signature does not include them."""
    unranked: frozenset[str] = frozenset()
    """Inputs that accept any shape. Their shape in the signature is empty."""
    left_out: Mapping[str, str] = {}
    """Names and types of the outputs that are omitted because they are not tensors."""

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model once. Implementations must not change or keep ``inputs``. The caller owns the outputs, which are in
        signature order.

        Inputs must already satisfy ``signature.check``. Raises InvalidInput if an operator rejects their values or sizes, and
        PenstockError (INTERNAL) if the engine fails.
        """
        ...

    def forward_within(self, inputs: Mapping[str, Array], limit_s: float) -> dict[str, Array]:
        """Like ``forward``, but engines that can stop a run raise DeadlineExceeded after ``limit_s``. No other run may be active."""
        return self.forward(inputs)

    def unload(self) -> None:
        """Release the memory. Idempotent. Call this when no ``forward`` is running. Later calls of ``forward`` raise Unavailable."""
        ...


Answer = Callable[[int, dict[str, Array] | PenstockError | None, bool], bool]
"""``answer(n, outcome, final)`` answers the n-th of the requests being executed.

``outcome`` is the outputs, an error, or None for an answer without outputs. ``final`` or an error ends the request. Returns False
once the client wants no more answers. Passing None without ``final`` sends nothing and only returns this flag."""


@runtime_checkable
class RequestModel(Protocol):
    """A model in memory that receives requests individually, with their ids and parameters, and answers each one separately."""

    @property
    def signature(self) -> Signature: ...

    @property
    def reentrant(self) -> bool:
        """True if several threads may run ``execute`` at the same time."""
        ...

    @property
    def decoupled(self) -> bool:
        """True if the model may send any number of answers to a request."""
        ...

    @property
    def max_batch(self) -> int | None:
        """Maximum rows of all requests in one ``execute`` call. 0: tensors have no batch dimension. None: the server decides."""
        ...

    def execute(self, requests: Sequence[InferRequest], answer: Answer) -> None:
        """Answer each of ``requests`` once before returning. A decoupled model receives one request at a time. It may send any
        number of answers until the final answer, from any thread, even after ``execute`` has returned. ``answer`` may block.

        The model may use the inputs until the request has ended. The caller owns the outputs. An exception fails all requests that
        have not ended.
        """
        ...

    def unload(self) -> None:
        """See ``LoadedModel.unload``."""
        ...


class Engine(Protocol):
    """Loads and checks artifacts of some formats. Engines are stateless, so all methods may be called from any thread.

    ``EngineTraits`` describes an engine without importing it.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def formats(self) -> frozenset[Format]: ...

    def gpus(self) -> int:
        """Number of this machine's GPUs that the installed engine can use."""
        ...

    def validate(self, artifact: Artifact, options: Options) -> list[Finding]:
        """Check ``artifact`` without loading it. Raises InvalidConfig for unknown options."""
        ...

    def estimate(self, artifact: Artifact, options: Options) -> Resources:
        """An upper bound on the resources that one loaded copy needs. Does not load the model."""
        ...

    def load(self, artifact: Artifact, options: Options) -> LoadedModel:
        """Load ``artifact``. Raises InvalidModel if the engine rejects the artifact, InvalidConfig for unknown options."""
        ...


class OptionsEngine(abc.ABC):
    """Base class of engines that have typed options and use memory in proportion to the model's size."""

    name: ClassVar[str]
    version: str
    formats: ClassVar[frozenset[Format]]
    options: ClassVar[type[msgspec.Struct]]
    """Type of the options. It has a field ``threads``."""
    copies: ClassVar[int]
    """Maximum number of copies of the weights in a loaded model."""
    fixed_bytes: ClassVar[int]
    """Memory of a loaded model in addition to its weights."""

    def __init__(self, machine: MachineFacts | None = None) -> None:
        """``machine`` describes the CPU that will run the models. The default is this machine."""
        self._machine = machine or _this_machine()

    def gpus(self) -> int:
        return 0

    def validate(self, artifact: Artifact, options: Options) -> list[Finding]:
        typed_options(self.name, options, self.options)
        return check_artifact(artifact, self.formats)

    def estimate(self, artifact: Artifact, options: Options) -> Resources:
        threads: int = msgspec.structs.asdict(typed_options(self.name, options, self.options))["threads"]
        return Resources(memory_bytes=self.copies * artifact.size_bytes + self.fixed_bytes, cores=max(1, threads))

    @abc.abstractmethod
    def load(self, artifact: Artifact, options: Options) -> LoadedModel: ...


_this_machine = functools.cache(machine_facts)


def check_artifact(artifact: Artifact, formats: frozenset[Format]) -> list[Finding]:
    """Findings about ``artifact`` that hold for every engine.

    A model in memory must include all its files. Otherwise, the engine would read a missing file from the working directory, where
    no digest protects it.
    """
    if artifact.format not in formats:
        message = f"this engine runs {listed(sorted(formats, key=list(Format).index))}, not {TITLES[artifact.format]}"
        return [Finding(Severity.ERROR, message)]
    if artifact.path is not None:
        return []
    if artifact.format in _OF_SEVERAL_FILES and not artifact.beside:
        message = f"a model of format '{artifact.format.value}' has several files, but their folder is not known"
        return [Finding(Severity.ERROR, message, "load it from its file")]
    return _external_data(artifact) if artifact.format is Format.ONNX else []


def _external_data(artifact: Artifact) -> list[Finding]:
    try:
        external = external_files(artifact.data)
    except ValueError:
        return [Finding(Severity.ERROR, "the bytes are not an ONNX model, or are truncated", "export the model again")]
    if not external.difference(entry.path for entry in artifact.beside):
        return []
    message = "the model has weights in external files, but their folder is not known"
    return [Finding(Severity.ERROR, message, "embed the data, or build a bundle from the model file")]


def missing_data(artifact: Artifact, path: str) -> InvalidModel:
    """The error about a missing external data file ``path`` of ``artifact``."""
    folder = artifact.path.parent.resolve() if artifact.path else Path()
    whole = folder / path
    file = whole.relative_to(folder) if whole.is_relative_to(folder) else whole.name
    return InvalidModel(f"the model's external data file '{file}' is missing", f"put '{file}' in the model's folder")


def run_error(reason: str, *, is_status: bool) -> PenstockError:
    """The error of a run that failed for ``reason``.

    ``is_status`` is true if an operator returned an error status. InvalidInput if the operator rejects values or sizes of its inputs:
    the model has loaded, so these come from the request. Every other failure, such as a lack of memory, is INTERNAL.
    """
    if is_status and _ABOUT_INPUTS.search(reason) and not _ABOUT_MEMORY.search(reason):
        return InvalidInput(f"the model rejects these inputs: {reason}", "change their values or sizes")
    return PenstockError(f"the model failed: {reason}")


def refuse_errors(findings: list[Finding]) -> None:
    """Raise InvalidModel with the first of ``findings`` that is an ERROR."""
    for finding in findings:
        if finding.severity is Severity.ERROR:
            raise InvalidModel(finding.message, finding.hint)


def declared_signature(options: Options) -> Signature | None:
    """The signature that the options ``inputs`` and ``outputs`` declare; None if both are absent or empty. Raises InvalidConfig.

    Each option is a list of ``{"name", "datatype", "shape"}``. Shapes include the batch dimension; -1 means any size.
    """
    declared = {part: options.get(part) or () for part in ("inputs", "outputs")}
    if not any(declared.values()):
        return None
    try:
        with _first_use:
            signature = msgspec.convert(declared, Signature)
    except msgspec.ValidationError as error:
        raise InvalidConfig(
            f"bad signature: {error}", 'write e.g. {"name": "x", "datatype": "FP32", "shape": [-1, 3]}'
        ) from None
    for part, specs in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        names = [spec.name for spec in specs]
        if not names or "" in names or len(set(names)) < len(names):
            raise InvalidConfig(f"the declared {part} must have different, non-empty names, got {names}")
        if any(dim < -1 for spec in specs for dim in spec.shape):
            raise InvalidConfig(f"a dimension of the declared {part} is below -1", "use -1 for any size")
    return signature


def typed_options(engine: str, options: Options, into: type[_Typed]) -> _Typed:
    """Convert ``options`` to the engine's struct. Numbers of threads are at most the cores that this process may use. Raises
    InvalidConfig for an unknown name or a wrong type.
    """
    known = [field.name for field in msgspec.structs.fields(into)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InvalidConfig(
            f"unknown option(s) for engine '{engine}': {', '.join(unknown)}", f"use one of: {', '.join(known)}"
        )
    try:
        with _first_use:
            typed = msgspec.convert(dict(options), into)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"bad option for engine '{engine}': {error}") from None
    cores = usable_cores()
    excess = {name: count for name in _THREADS if (count := getattr(typed, name, 0)) > cores}
    for name, count in excess.items():
        _warn_of_threads(name, count, cores)
    return msgspec.structs.replace(typed, **dict.fromkeys(excess, cores))


@functools.cache
def _warn_of_threads(name: str, count: int, cores: int) -> None:
    _log.warning("'%s' is %d, but only %d are used, the cores that this process may use", name, count, cores)
