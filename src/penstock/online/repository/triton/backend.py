"""Chooses the engine of a model version from its configuration's backend or platform, or from the files of the version."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from penstock.artifact import Format
from penstock.config import did_you_mean
from penstock.engines.registry import EngineTraits, ServedAs, engine_names, engines_for, get_engine, traits
from penstock.errors import InvalidConfig, NotFound, Unsupported
from penstock.online.repository.config import ModelConfig, Optimization
from penstock.online.repository.triton.rules import gpu_of, prefix, prefixed
from penstock.online.repository.triton.schema import to_message
from penstock.resources import core_ids


class Backend(msgspec.Struct, frozen=True):
    """Triton's names for a backend, and the engine that implements the backend."""

    name: str
    engine: str
    """Name of the engine; empty for a bundle, because the bundle determines the engine."""
    platform: str
    filename: str
    """Name of the model's file or folder within the version's folder."""


PYTHON = "python"
"""The engine of Python models, which is available only in the server. Each instance runs in a child process."""
_PYTHON = EngineTraits(
    "Python",
    "penstock.online.instances.python.engine",
    "PythonEngine",
    "penstock",
    (Format.PYTHON,),
    (ServedAs("python", "python", "model.py"),),
    takes_signature=True,
)


def engine_traits(name: str) -> EngineTraits:
    """``registry.traits``, extended by the engine of Python models."""
    return _PYTHON if name == PYTHON else traits(name)


def usual_engine(format: Format) -> str:
    """The engine for models of ``format`` whose configuration names no engine."""
    return PYTHON if format is Format.PYTHON else engines_for(format)[0]


_KNOWN = (
    *(
        Backend(served.backend, engine, served.platform, served.filename)
        for engine in (*engine_names(), PYTHON)
        for served in engine_traits(engine).served_as
    ),
    Backend("penstock", "", "penstock_bundle", "model.bundle"),
)
_ALIASES = {"armnn_tflite": "tensorflowlite", "torch": "pytorch", "tflite": "tensorflowlite"}
_NOT_HERE = {
    "tensorrt": "a plan runs on one kind of GPU only: serve the ONNX model that it was built from",
    "tensorrt_plan": "a plan runs on one kind of GPU only: serve the ONNX model that it was built from",
    "tensorflow_graphdef": "save the model as SavedModel",
    "dali": "write the steps as a Python model",
    "fil": "export the trees to ONNX",
}
_ACCELERATED = {("onnxruntime", "openvino"): "openvino"}
"""For a pair of engine and accelerator, the engine that runs the model instead."""
_GRAPH_LEVELS = {-1: "basic", 1: "extended", 2: "disabled"}


def backend_of(given: ModelConfig, name: str, files: Collection[str], where: str = "") -> Backend:
    """The backend of model ``name``, with the name of the model's file. ``files`` are the names in the version's folder.

    Raises Unsupported for a backend that only Triton has. Raises InvalidConfig for an unknown backend, or if backend and platform
    contradict each other. Raises NotFound if the model's file does not exist.
    """
    begin, filename = prefix(name, where), given.default_model_filename
    found = [one for one in _KNOWN if _matches(one, given, begin)]
    if not found:
        raise InvalidConfig(
            f"{begin}'backend' '{given.backend}' and 'platform' '{given.platform}' contradict each other",
            "remove 'platform'",
        )
    if filename:
        suffix = filename.rpartition(".")[2]
        found = [one for one in found if one.filename.endswith(f".{suffix}")] or (
            found if given.backend or given.platform else []
        )
        found = [msgspec.structs.replace(one, filename=filename) for one in found]
    present = [one for one in found if one.filename in files]
    if not present:
        wanted = " or ".join(dict.fromkeys(f"'{one.filename}'" for one in found))
        raise NotFound(
            f"{begin}the version's folder contains no {wanted}",
            f"it contains {', '.join(sorted(files)[:8])}" if files else "the folder is empty",
        )
    chosen = present[0]
    accelerators = given.optimization.accelerators if given.optimization else ()
    engines = (_ACCELERATED.get((chosen.engine, name)) for name in accelerators)
    return msgspec.structs.replace(chosen, engine=next(filter(None, engines), chosen.engine))


def _matches(known: Backend, given: ModelConfig, begin: str) -> bool:
    """True if ``given`` permits the backend ``known``. Raises Unsupported, InvalidConfig."""
    for field, own in (("backend", known.name), ("platform", known.platform)):
        word = getattr(given, field)
        if word in _NOT_HERE:
            raise Unsupported(f"{begin}'{field}' is '{word}', which Penstock does not run", _NOT_HERE[word])
        names = {getattr(one, "name" if field == "backend" else field) for one in _KNOWN}
        word = _ALIASES.get(word, word)
        if word and word not in names:
            raise InvalidConfig(f"{begin}'{field}' is '{word}', which is unknown", did_you_mean(word, sorted(names)))
        if word and word != own:
            return False
    return True


def engine_options(given: ModelConfig, name: str, engine: str, where: str = "") -> dict[str, Any]:
    """Derive the options of ``engine`` from the configured devices and from the parameters of Triton's backends.

    For a bundle, ``engine`` is empty. All other parameters are ignored. Raises InvalidConfig for a parameter that is not a number,
    and for a missing device.
    """
    begin, values = prefix(name, where), given.parameters
    options: dict[str, Any] = {}
    for key in engine_traits(engine).thread_parameters if engine else ():
        if key in values:
            options["threads"] = _number(begin, key, values)
    if engine in _OWN_OPTIONS:
        options |= _OWN_OPTIONS[engine](given, begin, values)
    with prefixed(begin):
        gpu = gpu_of(to_message(given).instance_group, gpus_here(engine))
    if gpu is not None:
        on_gpu = engine_traits(engine).gpu_options
        assert on_gpu is not None
        options |= on_gpu(gpu)
    return options


def _onnxruntime_options(given: ModelConfig, begin: str, values: Mapping[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if values.get("execution_mode") == "1":
        options["inter_op_threads"] = _number(begin, "inter_op_thread_count", values) or len(core_ids())
    if (level := (given.optimization or Optimization()).graph_level) in _GRAPH_LEVELS:
        options["graph_level"] = _GRAPH_LEVELS[level]
    if values.get("enable_mem_arena") == "0":
        options["arena"] = False
    return options


def _openvino_options(_given: ModelConfig, _begin: str, values: Mapping[str, str]) -> dict[str, Any]:
    precision = values.get("INFERENCE_PRECISION_HINT") or ("bf16" if values.get("ENFORCE_BF16") == "YES" else "")
    return {"precision": precision.lower()} if precision else {}


_OWN_OPTIONS = {"onnxruntime": _onnxruntime_options, "openvino": _openvino_options}
"""Functions that derive options of an engine from Triton's parameters, in addition to the options in ``EngineTraits``."""


def gpus_here(engine: str) -> int:
    """Number of GPUs that ``engine`` can use here; 0 for bundles, which are tuned for the CPU, and for Python models."""
    return get_engine(engine).gpus() if engine not in ("", PYTHON) else 0


def _number(begin: str, key: str, values: Mapping[str, str]) -> int:
    value = values.get(key, "0").strip()
    if not value.isascii() or not value.isdigit() or len(value) > 4:
        raise InvalidConfig(f"{begin}'parameters[{key}]' is '{value[:40]}', but must be a number below 10000")
    return int(value)
