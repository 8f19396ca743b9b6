"""ONNX Runtime: the default engine."""

from __future__ import annotations

import glob
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import onnxruntime as ort

from penstock.artifact import Artifact, Format
from penstock.engines.arena import LARGE_BYTES, ArenaTrimmer
from penstock.engines.base import (
    Finding,
    LoadedModel,
    Options,
    OptionsEngine,
    Severity,
    check_artifact,
    missing_data,
    refuse_errors,
    run_error,
    typed_options,
)
from penstock.engines.conversions import from_maps, from_text, from_value, to_text, to_value
from penstock.engines.custom_ops import python_ops
from penstock.engines.integer_division import guarded
from penstock.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    InvalidArgument,
    InvalidConfig,
    InvalidModel,
    PenstockError,
    Unavailable,
    Unsupported,
)
from penstock.protocol.onnx_scan import (
    has_control_flow,
    has_external_data,
    has_recurrence,
    may_have_half_constants,
    unranked_inputs,
)
from penstock.tensor import Array, DataType, Signature, TensorSpec

_ORT_NAMES = {DataType.FP32: "float", DataType.FP64: "double", DataType.BYTES: "string"}
"""The names of element types that differ between ONNX Runtime and numpy."""
_BY_ORT_TYPE = {f"tensor({_ORT_NAMES.get(each, each.dtype.name)})": each for each in DataType}

_MAPS = re.compile(r"seq\(map\((?:int64|string),(tensor\(\w+\))\)\)")
"""The type of an output with one map per row. Classifiers with ZipMap return their probabilities in this form."""

_UNKNOWN = re.compile(r"(?:Fatal error: )?([^\s:]+):(\S+)\(-?\d+\) is not a registered function/op")
"""The error about an operator that ONNX Runtime does not have."""

_GRAPH_LEVELS = {
    "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}

_SHARED_WEIGHTS = "Attempt to replace the existing tensor"
_INTEGER_OPERATORS = (b"QLinear", b"Integer", b"QAttention", b"QGemm")
"""Parts of the names of operators whose kernels multiply integers at every graph level."""
_CRASHING = "MatmulTransposeFusion"
"""A graph rewrite of ONNX Runtime 1.31 that ends the process at the level ``all``, if a product reads a transposed tensor and a
constant in FP16. Both rewrites that are needed for the crash change the inputs of the product; the other one, which casts constants to
FP32 once instead of in each run, is worth more."""
_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
_CUDA = "CUDAExecutionProvider"
_STATUSES = ("Fail", "InvalidArgument", "RuntimeException")
"""Errors that ONNX Runtime raises if an operator rejects its inputs. It also raises them for other failures."""
_LARGE_BYTES = 1 << 20
"""Size in bytes above which parsing a model would delay requests to other models by more than half a millisecond."""
# At a lower log level, ONNX Runtime would print errors that the caller receives as exceptions anyway.
_FATAL_ONLY = 4


class OnnxRuntimeOptions(msgspec.Struct, frozen=True):
    """Options of a session, with the defaults of ONNX Runtime."""

    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Threads within an operator; 0: one per core."""
    inter_op_threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Threads across operators, for models with parallel branches; 0 means sequential execution."""
    graph_level: Literal["disabled", "basic", "extended", "all"] = "all"
    """Level of ONNX Runtime's graph rewrites. Only ``all`` includes layout optimisations (blocked layouts such as NCHWc), which make
    convolutions faster."""
    arena: bool = True
    """Use a memory arena. This is faster, but the memory of a large batch is released only some seconds later."""
    spinning: bool = True
    """Let idle threads spin. This lowers latency but takes CPU time from other threads."""
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    """Execution providers in order of preference."""
    gpu: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of the GPU for ``CUDAExecutionProvider``."""


class OnnxRuntimeEngine(OptionsEngine):
    """Loads ONNX models into ONNX Runtime sessions."""

    name = "onnxruntime"
    version: str = ort.__version__
    formats = frozenset({Format.ONNX})
    options = OnnxRuntimeOptions
    copies = 3  # the weights as stored in the file, as initialisers, and as packed by the kernels
    fixed_bytes = 32 << 20

    def gpus(self) -> int:
        return len(glob.glob("/dev/nvidia[0-9]*")) if _CUDA in ort.get_available_providers() else 0

    def validate(self, artifact: Artifact, options: Options) -> list[Finding]:
        typed = typed_options(self.name, options, OnnxRuntimeOptions)
        return [*_missing_providers(typed), *super().validate(artifact, options)]

    def load(self, artifact: Artifact, options: Options) -> LoadedModel:
        typed = typed_options(self.name, options, OnnxRuntimeOptions)
        for finding in _missing_providers(typed):
            raise InvalidConfig(finding.message, finding.hint)
        refuse_errors(check_artifact(artifact, self.formats))
        session_options = _session_options(typed)
        if _may_have_half_constants(artifact.data):
            session_options.add_session_config_entry("optimization.disable_specified_optimizers", _CRASHING)
        reporting = _extensions(artifact, session_options)
        if not self._machine.has_integer_dot_product:
            # Without this option, ONNX Runtime adds pairs of products in 16 bits on this CPU, which saturates silently if weights
            # exceed 64. On CPUs with a dot product for integers, the option would only select slower kernels.
            session_options.add_session_config_entry("session.x64quantprecision", "1")
        providers = [(name, {"device_id": str(typed.gpu)} if name == _CUDA else {}) for name in typed.providers]
        try:
            with artifact.on_disk() as path:
                if path is not None:
                    session_options.add_session_config_entry(_EXTERNAL_FOLDER, str(path.parent.resolve()))
                safe = _guarded(artifact, path, providers)
                with _as_file(safe) as file:
                    session = _session(safe, file, session_options, providers)
        except Exception as error:
            raise _refusal(artifact, error) from error
        if _CUDA in typed.providers and _CUDA not in session.get_providers():  # ONNX Runtime would silently skip CUDA
            raise Unavailable(
                f"ONNX Runtime cannot compute on GPU {typed.gpu}", "check the driver, and CUDA's libraries"
            )
        recurrent = has_recurrence(artifact.data)
        if reporting is not None:
            return PythonOpsModel(session, typed.arena, reporting, recurrent=recurrent)
        model = OnnxRuntimeModel(session, typed.arena, recurrent=recurrent)
        is_steady = typed.providers == ("CPUExecutionProvider",) and not has_control_flow(artifact.data)
        model.predictable = model.predictable and is_steady
        model.unranked = unranked_inputs(artifact.data)
        return model


class OnnxRuntimeModel(LoadedModel):
    """One session. ONNX Runtime allows concurrent runs of one session."""

    reentrant = True

    def __init__(self, session: ort.InferenceSession, has_arena: bool, *, recurrent: bool = False) -> None:
        """``recurrent``: the model has operators that end the process if their input is empty."""
        outputs = {value.name: value for value in session.get_outputs()}
        specs = {name: _output_spec(value) for name, value in outputs.items()}
        self.left_out = {name: outputs[name].type for name, spec in specs.items() if spec is None}
        if len(self.left_out) == len(outputs):
            _spec(next(iter(outputs.values())))  # raises
        self.signature = Signature(
            tuple(_spec(value) for value in session.get_inputs()), tuple(spec for spec in specs.values() if spec)
        )
        self._maps = [spec for spec in self.signature.outputs if outputs[spec.name].type not in _BY_ORT_TYPE]
        optional = [value for value in session.get_overridable_initializers() if value.type in _BY_ORT_TYPE]
        self.optional_inputs = tuple(_spec(value) for value in optional)
        """Inputs that have a default value in the model. The signature does not include them."""
        self._names = self.signature.output_names
        self._session: ort.InferenceSession | None = session
        self._run_options: ort.RunOptions | None = None
        inputs = self.signature.inputs + self.optional_inputs
        self._filled = {spec.name for spec in inputs if recurrent and 0 not in spec.shape}
        """Inputs that must not be empty."""
        self._run: Callable[[Mapping[str, Array]], list[Array]] = self._run_arrays
        if any(spec.datatype is DataType.BF16 for spec in inputs + self.signature.outputs):
            self._run = self._run_values
        self._text_inputs = [spec.name for spec in inputs if spec.datatype is DataType.BYTES]
        self.predictable = not self._text_inputs  # strings differ in length
        self._text_outputs = [spec.name for spec in self.signature.outputs if spec.datatype is DataType.BYTES]
        self._trimmer: ArenaTrimmer | None = None
        if has_arena:
            self._trimmer = ArenaTrimmer(partial(trim_arena, session, self.signature.inputs))

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self._filled:
            _refuse_empty(inputs, self._filled)
        if self._text_inputs:
            texts = {name: to_text(name, inputs[name]) for name in self._text_inputs if name in inputs}
            inputs = {**inputs, **texts}
        try:
            outputs = self._run(inputs)
        except UnicodeDecodeError:
            raise InvalidArgument(
                f"ONNX Runtime returns only UTF-8 text, but an element of the outputs {self._text_outputs} is not UTF-8",
                "send text, or the bytes as a UINT8 tensor",
            ) from None
        except Exception as error:
            if self._session is None:
                raise Unavailable("the model has been unloaded") from None
            if self._trimmer is not None:
                self._trimmer.note_large()  # the failed run may have been large
            raise run_error(_reason(error), is_status=type(error).__name__ in _STATUSES) from error
        named = dict(zip(self._names, outputs, strict=True))
        for spec in self._maps:
            named[spec.name] = from_maps(spec, named[spec.name])
        for name in self._text_outputs:
            named[name] = from_text(named[name])
        size = 0  # plain loops are faster here than sum()
        for array in inputs.values():
            size += array.nbytes
        for array in named.values():
            size += array.nbytes
        if size >= LARGE_BYTES and self._trimmer is not None:
            self._trimmer.note_large()
        return named

    def forward_within(self, inputs: Mapping[str, Array], limit_s: float) -> dict[str, Array]:
        options = self._run_options = ort.RunOptions()
        timer = threading.Timer(limit_s, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            return self.forward(inputs)
        except PenstockError:
            if options.terminate:
                raise DeadlineExceeded(f"the run was ended after {limit_s:g} s") from None
            raise
        finally:
            timer.cancel()
            self._run_options = None

    def unload(self) -> None:
        self._session = None
        if self._trimmer is not None:
            self._trimmer.close()
            self._trimmer = None

    def _run_arrays(self, inputs: Mapping[str, Array]) -> list[Array]:
        return self._session.run(self._names, inputs, self._run_options)  # type: ignore[union-attr, no-any-return]

    def _run_values(self, inputs: Mapping[str, Array]) -> list[Array]:
        # ONNX Runtime's numpy interface does not support bfloat16, so such tensors are passed as 16-bit integers.
        feeds = {name: to_value(array) for name, array in inputs.items()}
        values = self._session.run_with_ort_values(self._names, feeds, self._run_options)  # type: ignore[union-attr]
        return [from_value(value) for value in values]


class PythonOpsModel(OnnxRuntimeModel):
    """A session with operators in Python, which hold the interpreter lock, need not be reentrant, and may keep state."""

    reentrant = False

    def __init__(
        self, session: ort.InferenceSession, has_arena: bool, reporting: Any, *, recurrent: bool = False
    ) -> None:
        super().__init__(session, has_arena, recurrent=recurrent)
        self.predictable, self.keeps_state = False, True
        self._reporting = reporting

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        options = self._run_options = self._run_options or ort.RunOptions()
        try:
            with self._reporting(options):
                return super().forward(inputs)
        finally:
            self._run_options = None


def _refuse_empty(inputs: Mapping[str, Array], names: Iterable[str]) -> None:
    for name in names:
        if name in inputs and not inputs[name].size:
            raise InvalidArgument(
                f"input '{name}' of shape {list(inputs[name].shape)} is empty, but the model has recurrent operators, "
                "such as LSTM and GRU, which ONNX Runtime cannot compute for an empty batch or sequence",
                "send at least one row and one step",
            )


def trim_arena(session: ort.InferenceSession, inputs: Iterable[TensorSpec]) -> None:
    """Release the unused parts of the arena. ONNX Runtime does this only at the end of a run, so a run is started and terminated.

    The inputs of this run have as few elements as their shapes allow. The run is terminated before it reads them.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    options.terminate = True
    arrays = {spec.name: np.zeros([max(0, dim) for dim in spec.shape], _feed_type(spec)) for spec in inputs}
    with suppress(Exception):  # a terminated run always raises an exception
        if any(spec.datatype is DataType.BF16 for spec in inputs):
            session.run_with_ort_values(None, {name: to_value(array) for name, array in arrays.items()}, options)
        else:
            session.run(None, arrays, options)


def _feed_type(spec: TensorSpec) -> np.dtype[Any]:
    return np.dtype(np.str_) if spec.datatype is DataType.BYTES else spec.datatype.dtype


@contextmanager
def _as_file(artifact: Artifact) -> Iterator[bytes | str]:
    """The model for a session: its bytes, or the path of an in-memory file that contains them.

    ONNX Runtime holds the interpreter lock while it parses bytes, but not while it reads a file. The in-memory file has no folder,
    so models with external data are loaded from bytes.
    """
    if len(artifact.data) < _LARGE_BYTES or _is_in_parts(artifact.data):
        yield artifact.data
        return
    file = artifact.in_memory()
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


def _is_in_parts(data: bytes) -> bool:
    try:
        return has_external_data(data)
    except ValueError:
        return True  # ONNX Runtime's own message is more precise


def _guarded(artifact: Artifact, path: Path | None, providers: list[Any]) -> Artifact:
    """``artifact`` with guarded divisions of integers, for loading only."""

    def types(model: bytes) -> dict[str, str]:
        options = _session_options(OnnxRuntimeOptions(threads=1, graph_level="disabled"))
        options.add_session_config_entry("session.disable_prepacking", "1")
        if path is not None:
            options.add_session_config_entry(_EXTERNAL_FOLDER, str(path.parent.resolve()))
        _extensions(artifact, options)
        with _as_file(msgspec.structs.replace(artifact, data=model)) as file:
            session = ort.InferenceSession(file, options, providers=providers)
        return {value.name: value.type for value in session.get_outputs()}

    return msgspec.structs.replace(artifact, data=guarded(artifact.data, types))


def _may_have_half_constants(data: bytes) -> bool:
    try:
        return may_have_half_constants(data)
    except ValueError:
        return False  # ONNX Runtime refuses the model


def _missing_providers(options: OnnxRuntimeOptions) -> list[Finding]:
    available = ort.get_available_providers()
    return [
        Finding(
            Severity.ERROR,
            f"execution provider '{provider}' is not in this build of ONNX Runtime",
            f"available: {', '.join(available)}",
        )
        for provider in options.providers
        if provider not in available
    ]


def _session_options(options: OnnxRuntimeOptions) -> ort.SessionOptions:
    session_options = ort.SessionOptions()
    session_options.intra_op_num_threads = options.threads
    session_options.log_severity_level = _FATAL_ONLY
    if options.inter_op_threads:
        session_options.inter_op_num_threads = options.inter_op_threads
        session_options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    session_options.graph_optimization_level = _GRAPH_LEVELS[options.graph_level]
    session_options.enable_cpu_mem_arena = options.arena
    # Otherwise ONNX Runtime detects the format and also accepts its own, which was not checked.
    session_options.add_session_config_entry("session.load_model_format", "ONNX")
    session_options.add_session_config_entry("session.intra_op.allow_spinning", "1" if options.spinning else "0")
    # Otherwise products with weights that are stored as integers also round their activations to INT8, which the model does not say.
    session_options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return session_options


def _extensions(artifact: Artifact, options: ort.SessionOptions) -> Any:
    """Add the operators in Python that ``artifact`` may need to ``options``. Returns the context of runs; None without any."""
    if not (operators := python_ops(artifact.data)):
        return None
    try:
        from penstock.engines import extensions  # noqa: PLC0415 - its package is optional
    except ImportError as error:
        raise EngineUnavailable("onnxruntime-extensions", "penstock[extensions]", reason=str(error)) from error
    path, functions = extensions.library(operators)
    options.register_custom_ops_library(path)
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    return partial(extensions.reporting, functions=functions)


def _spec(value: Any) -> TensorSpec:
    datatype = _BY_ORT_TYPE.get(value.type)
    if datatype is None:
        raise Unsupported(f"'{value.name}' is a {value.type}, which has no tensor datatype in the protocol")
    return TensorSpec(
        value.name, datatype, tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in value.shape)
    )


def _output_spec(value: Any) -> TensorSpec | None:
    """The spec of an output; None if no tensor can represent it. Maps with the same keys become the rows of one tensor."""
    if maps := _MAPS.fullmatch(value.type):
        return TensorSpec(value.name, _BY_ORT_TYPE[maps[1]], (-1, -1))
    return _spec(value) if value.type in _BY_ORT_TYPE else None


def _session(artifact: Artifact, file: Any, options: ort.SessionOptions, providers: list[Any]) -> ort.InferenceSession:
    """The session of ``file``, the main file of ``artifact``.

    ONNX Runtime's exact kernels cannot use weights that several operators share. If loading fails for this reason, a QDQ model is
    loaded at the level ``basic``, at which products are computed in floats. This is exact but slower.
    """
    try:
        return ort.InferenceSession(file, options, providers=providers)
    except Exception as error:
        if _SHARED_WEIGHTS not in str(error) or any(name in artifact.data for name in _INTEGER_OPERATORS):
            raise
        options.graph_optimization_level = _GRAPH_LEVELS["basic"]
        return ort.InferenceSession(file, options, providers=providers)


def _refusal(artifact: Artifact, error: Exception) -> InvalidModel:
    reason = _reason(error)
    if missing := re.search(r'data path does not exist: "(.+)"', reason):
        return missing_data(artifact, missing[1])
    if unknown := _UNKNOWN.search(reason):
        return InvalidModel(
            f"the model needs the operator '{unknown[1]}::{unknown[2]}', which ONNX Runtime does not have",
            "if it is in Python, name the file that registers it with --ops of `penstock convert`, `infer` or `serve`, or with "
            "ops= of penstock.open; `penstock inspect` names the file. Otherwise, export the model again without this operator",
        )
    hint = "check it with onnx.checker, or export it again"
    if newest := re.search(r"max supported IR version: (\d+)", reason):
        hint = (
            f"export it with IR version {newest[1]} or older, the newest that ONNX Runtime {ort.__version__} supports"
        )
    elif newest := re.search(r"support for domain (\S+) is till opset (\d+)", reason):
        hint = f"export it with opset {newest[2]} of {newest[1]} or older, the newest that ONNX Runtime {ort.__version__} supports"
    return InvalidModel(f"ONNX Runtime refuses the model: {reason}", hint)


def _reason(error: Exception) -> str:
    """The first line of ``error`` without ONNX Runtime's error class, source file and C++ signature, but with the operator's name."""
    line = str(error).strip().partition("\n")[0]
    line = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", line)
    line = re.sub(r"\S*/onnxruntime/\S+:\d+ .*?\)(?: const)?(?: \[with .*?\])? ", "", line)
    line = re.sub(r"\b\w+\.(?:h|cc):\d+ \w+ ", "", line)
    line = re.sub(r"^Non-zero status code returned while running (\w+) node\. Name:", r"\1 ", line)
    return line.replace(" '' Status Message:", ":").replace(" Status Message:", ":")[:400]
