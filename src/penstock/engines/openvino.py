"""OpenVINO: Intel's engine, fast on x86 CPUs. It runs OpenVINO IR and ONNX, also quantised (QDQ). Extra ``penstock[openvino]``."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import openvino as ov

from penstock.artifact import Artifact, Format
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
from penstock.errors import InvalidArgument, InvalidModel, Unavailable, Unsupported
from penstock.protocol.onnx_scan import has_external_data
from penstock.resources import usable_cores
from penstock.tensor import Array, DataType, Signature, TensorSpec

_BY_OPENVINO_TYPE = {
    "boolean": DataType.BOOL,
    "bf16": DataType.BF16,
    "string": DataType.BYTES,
    **{
        f"{kind}{bits}": DataType(f"{name}{bits}")
        for kind, name in (("u", "UINT"), ("i", "INT"))
        for bits in (8, 16, 32, 64)
    },
    **{f"f{bits}": DataType(f"FP{bits}") for bits in (16, 32, 64)},
}


# The CPU plug-in computes these types in signed 32 bits and does not report overflow.
_NARROWED = (DataType.INT64, DataType.UINT64, DataType.UINT32)
_INT32 = np.iinfo(np.int32)
_SAME_VALUES = ("Convert", "Reshape", "Squeeze", "Unsqueeze")
"""Operators between an input and a Gather that keep the values of its indices."""
_EXACT = 64
"""The largest magnitude of weights at which the sum of two products of a weight and an unsigned byte fits into 16 bits."""

ov.Type.f32.to_dtype()  # OpenVINO's bindings deadlock if two threads make the first use of numpy at the same time

# One OpenVINO ``Core`` per process, because loading its plug-ins takes 50 ms and memory. Several threads may compile at once.
_core_lock = threading.Lock()
_cores: list[ov.Core] = []


class OpenVinoOptions(msgspec.Struct, frozen=True):
    """Options of a compiled model."""

    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Threads; 0: all cores."""
    precision: Literal["f32", "bf16", "f16"] = "f32"
    """Arithmetic of float operators. Always set explicitly, because OpenVINO would silently choose BF16 on CPUs that support it."""


class OpenVinoEngine(OptionsEngine):
    """Compiles ONNX and IR models for the CPU plug-in."""

    name = "openvino"
    version: str = ov.__version__.partition("-")[0]
    formats = frozenset({Format.ONNX, Format.OPENVINO_IR})
    options = OpenVinoOptions
    copies = 4  # the model's bytes, OpenVINO's copy of the weights, and the packed weights
    fixed_bytes = 128 << 20

    def validate(self, artifact: Artifact, options: Options) -> list[Finding]:
        typed = typed_options(self.name, options, OpenVinoOptions)
        findings = super().validate(artifact, options)
        if typed.precision.upper() not in capabilities() and typed.precision != "f32":
            findings.append(
                Finding(
                    Severity.WARNING,
                    f"this CPU has no {typed.precision} arithmetic; OpenVINO will emulate it or run f32",
                )
            )
        return findings

    def load(self, artifact: Artifact, options: Options) -> LoadedModel:
        typed = typed_options(self.name, options, OpenVinoOptions)
        refuse_errors(check_artifact(artifact, self.formats))
        config = {
            "INFERENCE_PRECISION_HINT": typed.precision,
            # One request at a time, with all threads.
            "PERFORMANCE_HINT": "LATENCY",
            # With one thread and one stream, OpenVINO swallows the errors of a run and leaves the outputs of an earlier run. Without
            # streams, the calling thread computes alone, and errors are raised.
            "NUM_STREAMS": "0" if (typed.threads or usable_cores()) == 1 else "1",
            # Pinned threads of several models would compete for the same cores.
            "ENABLE_CPU_PINNING": "NO",
            # Otherwise products with weights that are stored as integers also round their activations.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        }
        if typed.threads:
            config["INFERENCE_NUM_THREADS"] = str(typed.threads)
        try:
            with artifact.on_disk() as path:
                model = _read(artifact, path)
                signature = _signature(model)
                if not self._machine.has_integer_dot_product and any(map(_has_8_bit_weights, model.get_ops())):
                    # Compute in float, because on this CPU integer kernels add pairs of products in 16 bits, which saturates
                    # silently.
                    config["LP_TRANSFORMS_MODE"] = "NO"
                return OpenVinoModel(_core().compile_model(model, "CPU", config), signature, _id_bounds(model))
        except (InvalidModel, Unsupported):
            raise
        except Exception as error:
            file = re.search(r"(?:data_full_path: |stored data in file \()(.+?), offset", str(error))
            if file and artifact.path and not (artifact.path.parent / file[1]).exists():
                raise missing_data(artifact, file[1]) from error
            reason = _reason(error).replace(str(artifact.path), artifact.path.name if artifact.path else "")
            raise InvalidModel(
                f"OpenVINO refuses the model: {reason}", "use another engine, or export the model again"
            ) from error


class OpenVinoModel(LoadedModel):
    """One compiled model with one inference request. Only one thread may use it at a time.

    The CPU plug-in computes 64-bit floats in 32 bits, and 64-bit and unsigned integers in signed 32 bits. Inputs beyond that range
    are rejected with InvalidArgument, since the outputs would be silently wrong.
    """

    def __init__(
        self, compiled: ov.CompiledModel, signature: Signature, id_bounds: Mapping[str, tuple[int, int]] = {}
    ) -> None:
        self.signature = signature
        self._id_bounds = id_bounds
        self._names = signature.output_names
        self._narrowed = [spec.name for spec in signature.inputs if spec.datatype in _NARROWED]
        self._bits = [spec.datatype is DataType.BF16 for spec in signature.outputs]
        self._request: ov.InferRequest | None = compiled.create_infer_request()

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        request = self._request
        if request is None:
            raise Unavailable("the model has been unloaded")
        for name in self._narrowed:
            _check_range(name, inputs[name])
        for name, bounds in self._id_bounds.items():
            _check_ids(name, inputs[name], *bounds)
        try:
            # share_inputs avoids a copy of each input. Outputs are copied, since the next run overwrites them.
            results = request.infer(
                {name: _feed(array) for name, array in inputs.items()}, share_inputs=True, share_outputs=False
            )
        except Exception as error:
            raise run_error(_run_reason(error), is_status=isinstance(error, RuntimeError)) from error
        arrays = results.to_tuple()
        return {
            name: array.view(DataType.BF16.dtype) if bits and array.dtype.itemsize == 2 else array
            for name, array, bits in zip(self._names, arrays, self._bits, strict=True)
        }

    def unload(self) -> None:
        self._request = None


def capabilities() -> set[str]:
    """The precisions that this CPU supports, by OpenVINO's names, e.g. ``FP32 INT8 BF16``."""
    return set(_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


def _core() -> ov.Core:
    with _core_lock:
        if not _cores:
            _cores.append(ov.Core())
        return _cores[0]


def _read(artifact: Artifact, path: Path | None) -> ov.Model:
    """Read the model of ``artifact`` from its main file ``path``; its other files are in the same folder."""
    if path is not None and artifact.format is Format.OPENVINO_IR:
        weights = path.with_suffix(".bin")
        if not weights.is_file():
            raise InvalidModel(
                f"'{weights.name}' is missing; it contains the model's weights", "put it in the model's folder"
            )
        # Otherwise OpenVINO tries every format that it supports.
        if not artifact.data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"<?xml", b"<net")):
            raise InvalidModel(f"'{path.name}' is not an OpenVINO model", "save it with openvino.save_model")
        return _core().read_model(path)
    if path is not None and has_external_data(artifact.data):
        return _core().read_model(path)  # OpenVINO reads the other files from the folder of this file
    return _core().read_model(artifact.data)


def _has_8_bit_weights(node: Any) -> bool:
    """True if ``node`` holds or produces weights that are too large for the 16-bit integer kernels (see ``_EXACT``)."""
    kind = node.get_type_name()
    if kind == "Constant" and node.get_element_type() == ov.Type.i8 and node.data.size:
        return bool(node.data.min() < -_EXACT or node.data.max() > _EXACT)
    if kind != "FakeQuantize" or node.get_attributes()["levels"] <= 2 * _EXACT + 1:
        return False
    source = node.input_value(0).get_node()
    while source.get_type_name() == "Convert":
        source = source.input_value(0).get_node()
    return bool(source.get_type_name() == "Constant")


def _feed(array: Array) -> Any:
    if array.dtype == DataType.BF16.dtype:
        bits = np.ascontiguousarray(array).view(np.uint16)
        return ov.Tensor(bits, bits.shape, ov.Type.bf16)
    return array


def _check_range(name: str, array: Array) -> None:
    if array.size and (array.max() > _INT32.max or array.min() < _INT32.min):
        raise InvalidArgument(
            f"input '{name}' contains integers beyond 32 bits, which OpenVINO would truncate",
            "use the onnxruntime engine",
        )


def _check_ids(name: str, ids: Array, low: int, high: int) -> None:
    if ids.size and (ids.min() < low or ids.max() > high):
        worst = ids.max() if ids.max() > high else ids.min()
        raise run_error(
            f"input '{name}' has index {worst}, which is out of the range [{low},{high}] of its table", is_status=True
        )


def _id_bounds(model: ov.Model) -> dict[str, tuple[int, int]]:
    """Minimum and maximum of the inputs that select rows of a table. OpenVINO does not check them, and reads zeros or other data."""
    found: dict[str, tuple[int, int]] = {}
    for node in model.get_ops():
        if node.get_type_name() != "Gather":
            continue
        table, axis = node.input_value(0).get_partial_shape(), node.input_value(2).get_node()
        source = node.input_value(1).get_node()
        while source.get_type_name() in _SAME_VALUES:
            source = source.input_value(0).get_node()
        is_fixed = axis.get_type_name() == "Constant" and table.rank.is_static
        size = table[int(axis.data.ravel()[0])] if is_fixed else ov.Dimension()
        if source.get_type_name() == "Parameter" and size.is_static:
            low, high = found.get(name := source.output(0).get_any_name(), (-(1 << 31), (1 << 31) - 1))
            found[name] = max(low, -size.get_length()), min(high, size.get_length() - 1)
    return found


def _signature(model: ov.Model) -> Signature:
    return Signature(tuple(_spec(port) for port in model.inputs), tuple(_spec(port) for port in model.outputs))


def _spec(port: Any) -> TensorSpec:
    # OpenVINO merges equal tensors and lists all their names. The name in the ONNX file is the shortest, but not always the first.
    name = port.get_any_name()
    datatype = _BY_OPENVINO_TYPE.get(port.get_element_type().get_type_name())
    if datatype is None:
        raise Unsupported(
            f"'{name}' is of type {port.get_element_type()}, which has no tensor datatype in the protocol"
        )
    if datatype is DataType.BYTES:
        raise Unsupported(
            f"'{name}' is a string tensor, which the OpenVINO engine does not support", "use the onnxruntime engine"
        )
    shape = tuple(dim.get_length() if dim.is_static else -1 for dim in port.get_partial_shape())
    return TensorSpec(name, datatype, shape)


def _run_reason(error: Exception) -> str:
    """The last line of ``error``, with the operator that failed."""
    node = re.search(
        r"\[CPU\] (?P<kind>\w+) node with name '(?P<name>[^']*)'|Node (?P<n>\S+) of type (?P<k>\w+)", str(error)
    )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[-1] if lines and not lines[-1].endswith(":") else _reason(error)
    operator = f"{node['kind'] or node['k']} '{node['name'] or node['n']}': " if node else ""
    return (operator + told)[:400]


def _reason(error: Exception) -> str:
    # OpenVINO lists source locations in lines that end with a colon, followed by the reason.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.endswith(":") and not line.startswith("Model wasn't fully converted")]
    return (told or lines or [type(error).__name__])[0].removeprefix("-- ")[:400]
