"""Keras: models in ``.keras`` and ``.h5`` files, and model objects, as functions of named tensors.

Before a file is loaded, its configuration is searched for parts that run code: Lambda layers, and classes outside Keras.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import tensorflow as tf

from penstock.errors import InvalidModel, PermissionDenied, Unsupported, shortened
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.tensorflow.sources import TensorFlowFunction, by_declaration, outputs_by_name, reason

KerasModel = keras.Model
_HDF5 = b"\x89HDF\r\n\x1a\n"
_MAX_CONFIG = 64 << 20


def is_keras(path: Path) -> bool:
    """True for the formats ``.keras`` and ``.h5``."""
    with path.open("rb") as file:
        return file.read(8) == _HDF5 or zipfile.is_zipfile(path)


def load(path: Path, trusted: bool) -> Any:
    """The model in ``path``. Raises InvalidModel, Unsupported, and PermissionDenied if it contains code and is not ``trusted``."""
    config = _config(path)
    dangers = list(dict.fromkeys(_dangers(config)))
    if dangers and not trusted:
        raise PermissionDenied(
            f"loading '{path.name}' can run code: {shortened('; '.join(dangers), 400)}",
            "if you trust the file, add --trust-pickle; otherwise give the model as module:callable",
        )
    try:
        return keras.saving.load_model(path, compile=False, safe_mode=not trusted)
    except Exception as error:
        if "Could not locate class" in str(error) or "Unknown layer" in str(error):
            raise Unsupported(
                f"the model uses classes that Keras does not have: {reason(error)}",
                "register them with keras.saving.register_keras_serializable, and give the model as module:callable",
            ) from error
        raise InvalidModel(
            f"Keras cannot load '{path.name}': {reason(error)}", "save the model again with this Keras"
        ) from error


def function_of(model: Any, options: ConvertOptions) -> TensorFlowFunction:
    """``model`` in inference mode."""
    structure = _structure(model)
    if structure is None:
        return _unbuilt(model, options)
    flat = keras.tree.flatten(structure)
    names = _distinct([_tail(one.name) for one in flat])
    specs = tuple(tf.TensorSpec(one.shape, one.dtype, name) for one, name in zip(flat, names, strict=True))
    output_names = _distinct(getattr(model, "output_names", None) or [layer.name for layer in model.layers[-1:]])

    def call(given: Mapping[str, Any]) -> Mapping[str, Any]:
        found = model(keras.tree.pack_sequence_as(structure, [given[name] for name in names]), training=False)
        if isinstance(found, Mapping) or len(output_names) != len(keras.tree.flatten(found)):
            return outputs_by_name(found)
        return dict(zip(output_names, keras.tree.flatten(found), strict=True))

    return TensorFlowFunction(call, specs, model)


def _structure(model: Any) -> Any:
    """The symbolic inputs of ``model`` as its call takes them; None for a subclassed model, which has none."""
    try:
        return model.input
    except (AttributeError, ValueError):  # a Sequential model from a file has inputs, but no input
        inputs = getattr(model, "inputs", None) or [None]
        return inputs[0] if len(inputs) == 1 else inputs


def _unbuilt(model: Any, options: ConvertOptions) -> TensorFlowFunction:
    shapes = getattr(model, "_build_shapes_dict", None) or {}  # keras has no public name for it
    built = [shape for shape in shapes.values() if isinstance(shape, tuple)]
    example = ",".join("N" if size is None else str(size) for size in built[0]) if built else "N,..."
    return by_declaration(
        lambda *given, **named: model(*given, training=False, **named), model.call, options, example, model
    )


def _tail(name: str) -> str:
    return name.partition(":")[0].rpartition("/")[2]


def _distinct(names: list[str]) -> list[str]:
    """``names`` with a number after each repeated name."""
    return [
        name if name not in names[:index] else f"{name}_{names[:index].count(name)}" for index, name in enumerate(names)
    ]


def _config(path: Path) -> Any:
    """The configuration that Keras will load from ``path``. Raises InvalidModel.

    A file can be an archive and HDF5 at the same time. Keras reads the one that the suffix names, so this does too.
    """
    try:
        if path.name.endswith(".keras"):
            with zipfile.ZipFile(path) as archive:
                if archive.getinfo("config.json").file_size > _MAX_CONFIG:
                    raise InvalidModel(f"the configuration in '{path.name}' exceeds 64 MiB")
                return json.loads(archive.read("config.json"))
        with h5py.File(path, "r") as file:
            text = file.attrs.get("model_config")
            if text is None:
                raise InvalidModel(
                    f"'{path.name}' has no model, only weights or other data", "save the whole model with model.save"
                )
            return json.loads(text)
    except (OSError, KeyError, ValueError, RecursionError, zipfile.BadZipFile) as error:
        raise InvalidModel(f"'{path.name}' is not a Keras model: {reason(error)}", "save the model again") from error


def _dangers(config: Any) -> Iterator[str]:
    """The parts of ``config`` that can run code."""
    pending = [config]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            pending.extend(reversed(list(part.values())))
            kind, module = part.get("class_name"), part.get("module")
            inner = part.get("config")
            name = inner.get("name", "") if isinstance(inner, Mapping) else ""
            if kind in ("Lambda", "__lambda__"):
                yield f"Lambda layer '{name}'" if name else "a lambda function"
            elif isinstance(module, str) and module.split(".")[0] not in ("keras", "builtins"):
                yield f"class {module}.{kind}"
        elif isinstance(part, list):
            pending.extend(reversed(part))
