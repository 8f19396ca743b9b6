"""Engines by name. An engine's file, and with it the package it wraps, is imported only when that engine is asked for."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from penstock.artifact import Format
from penstock.engines.base import Engine
from penstock.errors import EngineUnavailable, InvalidArgument


class _Entry(NamedTuple):
    module: str
    attribute: str
    install: str
    """What to give to pip."""
    formats: tuple[Format, ...]


_ENGINES = {
    "onnxruntime": _Entry("penstock.engines.onnxruntime", "OnnxRuntimeEngine", "penstock", (Format.ONNX,)),
    "openvino": _Entry(
        "penstock.engines.openvino", "OpenVinoEngine", "penstock[openvino]", (Format.ONNX, Format.OPENVINO_IR)
    ),
    "torch": _Entry(
        "penstock.engines.torch", "TorchEngine", "penstock[torch]", (Format.TORCHSCRIPT, Format.EXPORTED_PROGRAM)
    ),
    "tflite": _Entry("penstock.engines.tflite", "TfLiteEngine", "penstock[tflite]", (Format.TFLITE,)),
    "tensorflow": _Entry(
        "penstock.engines.tensorflow", "TensorFlowEngine", "penstock[tensorflow]", (Format.SAVED_MODEL,)
    ),
    "python": _Entry("penstock.online.instances.python.engine", "PythonEngine", "penstock", (Format.PYTHON,)),
}


def get_engine(name: str) -> Engine:
    """The engine called ``name``. Raises InvalidArgument if unknown, EngineUnavailable if its package is missing."""
    if name not in _ENGINES:
        raise InvalidArgument(f"unknown engine '{name}'", f"known: {', '.join(_ENGINES)}")
    entry = _ENGINES[name]
    try:
        engine: Engine = getattr(importlib.import_module(entry.module), entry.attribute)()
    except ImportError as error:
        raise EngineUnavailable(name, entry.install, reason=str(error)) from error
    return engine


def engines_for(format: Format) -> list[str]:
    """Names of the engines that run models of ``format``, the usual one first; imports none, so they may be missing here."""
    return [name for name, entry in _ENGINES.items() if format in entry.formats]


def available_engines(format: Format = Format.ONNX) -> list[str]:
    """Names of the engines for ``format`` that can be loaded here; imports them to find out."""
    return [name for name in engines_for(format) if is_available(name)]


def is_available(name: str) -> bool:
    """Whether engine ``name`` can be loaded here; imports it to find out. False for one that Penstock does not know."""
    try:
        get_engine(name)
    except (EngineUnavailable, InvalidArgument):
        return False
    return True
