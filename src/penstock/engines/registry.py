"""Engines by name, with their traits. Only ``get_engine`` imports an engine's file and the package that it wraps."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.artifact import Format
from penstock.engines.base import Engine
from penstock.errors import EngineUnavailable, InvalidArgument


class ServedAs(msgspec.Struct, frozen=True):
    """The names that select an engine in a model repository."""

    backend: str
    platform: str
    filename: str
    """Default name of the model's file or folder inside the version folder."""


class EngineTraits(msgspec.Struct, frozen=True):
    """Facts about an engine, readable without importing its package."""

    title: str
    """The engine's name in texts for people."""
    module: str
    class_name: str
    install: str
    """Argument of ``pip install``."""
    formats: tuple[Format, ...]
    served_as: tuple[ServedAs, ...]
    platform: str = ""
    """The platform that the protocol reports for a model without a configuration. If empty, the engine's name is reported."""
    takes_signature: bool = False
    """True if the engine has the options ``inputs`` and ``outputs``, because some of its models lack a signature."""
    keeps_threads: bool = True
    """True if a loaded model has background threads of its engine, even if the option ``threads`` is 1."""
    shared_options: Mapping[str, Any] = {}
    """Options for models that use several threads on the same cores as a server."""
    precisions: tuple[str, ...] = ()
    """Valid values of the option ``precision`` (the arithmetic of float operators). Empty if the engine has no such option."""
    thread_parameters: tuple[str, ...] = ()
    """Parameters of a model's configuration that set the option ``threads``."""
    gpu_options: Callable[[int], Mapping[str, Any]] | None = None
    """Returns the options that select the GPU with a given number. None if the engine supports only CPUs."""


_ENGINES = {
    "onnxruntime": EngineTraits(
        "ONNX Runtime",
        "penstock.engines.onnxruntime",
        "OnnxRuntimeEngine",
        "penstock",
        (Format.ONNX,),
        (ServedAs("onnxruntime", "onnxruntime_onnx", "model.onnx"),),
        platform="onnxruntime_onnx",
        keeps_threads=False,
        # Threads that spin after a call occupy the core that the server's event loop needs.
        shared_options={"spinning": False},
        thread_parameters=("intra_op_thread_count",),
        gpu_options=lambda gpu: {"providers": ("CUDAExecutionProvider", "CPUExecutionProvider"), "gpu": gpu},
    ),
    "torch": EngineTraits(
        "PyTorch",
        "penstock.engines.torch",
        "TorchEngine",
        "penstock[torch]",
        (Format.TORCHSCRIPT, Format.EXPORTED_PROGRAM),
        (ServedAs("pytorch", "pytorch_libtorch", "model.pt"), ServedAs("pytorch", "pytorch_export", "model.pt2")),
        takes_signature=True,
        thread_parameters=("INTRA_OP_THREAD_COUNT",),
        gpu_options=lambda gpu: {"device": f"cuda:{gpu}"},
    ),
    "openvino": EngineTraits(
        "OpenVINO",
        "penstock.engines.openvino",
        "OpenVinoEngine",
        "penstock[openvino]",
        (Format.ONNX, Format.OPENVINO_IR),
        (ServedAs("openvino", "openvino", "model.xml"), ServedAs("openvino", "openvino", "model.onnx")),
        precisions=("f32", "bf16", "f16"),
        thread_parameters=("INFERENCE_NUM_THREADS", "CPU_THREADS_NUM"),
    ),
    "tflite": EngineTraits(
        "TensorFlow Lite",
        "penstock.engines.tflite",
        "TfLiteEngine",
        "penstock[tflite]",
        (Format.TFLITE,),
        (ServedAs("tensorflowlite", "tensorflowlite", "model.tflite"),),
    ),
    "tensorflow": EngineTraits(
        "TensorFlow",
        "penstock.engines.tensorflow",
        "TensorFlowEngine",
        "penstock[tensorflow]",
        (Format.SAVED_MODEL,),
        (ServedAs("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),),
    ),
}


def traits(name: str) -> EngineTraits:
    """The traits of the engine ``name``, which need not be installed. Raises InvalidArgument if ``name`` is unknown."""
    if name not in _ENGINES:
        raise InvalidArgument(f"unknown engine '{name}'", f"use one of: {', '.join(_ENGINES)}")
    return _ENGINES[name]


def engine_title(name: str) -> str:
    """The engine's name for people, e.g. ``ONNX Runtime``; ``name`` if the engine is unknown."""
    return _ENGINES[name].title if name in _ENGINES else name


def engine_names() -> Sequence[str]:
    """The names of all engines, whether installed or not. The default engine of a format precedes its other engines."""
    return tuple(_ENGINES)


def get_engine(name: str) -> Engine:
    """The engine called ``name``. Raises InvalidArgument if ``name`` is unknown, EngineUnavailable if its package is missing."""
    known = traits(name)
    try:
        engine: Engine = getattr(importlib.import_module(known.module), known.class_name)()
    except ImportError as error:
        raise EngineUnavailable(name, known.install, reason=str(error)) from error
    return engine


def engines_for(format: Format) -> list[str]:
    """Names of the engines that run models of ``format``, the default first. Does not import the engines; some may be missing."""
    return [name for name, known in _ENGINES.items() if format in known.formats]


def available_engines(format: Format = Format.ONNX) -> list[str]:
    """Names of the engines for ``format`` that are installed. Imports the engines to find out."""
    return [name for name in engines_for(format) if is_available(name)]


def is_available(name: str) -> bool:
    """True if engine ``name`` is known and installed. Imports the engine to find out."""
    try:
        get_engine(name)
    except (EngineUnavailable, InvalidArgument):
        return False
    return True
