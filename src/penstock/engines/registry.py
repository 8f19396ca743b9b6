"""Engines by name. An engine's file, and with it the package it wraps, is imported only when that engine is asked for."""

from __future__ import annotations

import importlib

from penstock.engines.base import Engine
from penstock.errors import EngineUnavailable, InvalidArgument

# name -> (module, class, what to give to pip)
_ENGINES = {
    "onnxruntime": ("penstock.engines.onnxruntime", "OnnxRuntimeEngine", "penstock"),
    "openvino": ("penstock.engines.openvino", "OpenVinoEngine", "penstock[openvino]"),
}


def get_engine(name: str) -> Engine:
    """The engine called ``name``. Raises InvalidArgument if unknown, EngineUnavailable if its package is missing."""
    if name not in _ENGINES:
        raise InvalidArgument(f"unknown engine '{name}'", f"known: {', '.join(_ENGINES)}")
    module, attribute, install = _ENGINES[name]
    try:
        engine: Engine = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        raise EngineUnavailable(name, install, reason=str(error)) from error
    return engine


def available_engines() -> list[str]:
    """Names of the engines that can be loaded here."""
    return [name for name in _ENGINES if is_available(name)]


def is_available(name: str) -> bool:
    """Whether engine ``name`` can be loaded here; imports it to find out. False for one that Penstock does not know."""
    try:
        get_engine(name)
    except (EngineUnavailable, InvalidArgument):
        return False
    return True
