"""Detects the format of a source by its content. The suffix only decides between formats whose content looks the same.

Nothing is loaded: an archive's list of members, the first bytes, or the numbers of a message's fields suffice.
"""

from __future__ import annotations

import itertools
import json
import mmap
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

from penstock.artifact import refuse_declaration
from penstock.errors import InvalidModel, NotFound, Unsupported
from penstock.offline.convert.registry import FORMATS
from penstock.protocol.varint import read_fields

_HEAD_BYTES = 1 << 16
_MAX_FIELDS = 1 << 20
_AGAIN = "export it again, or fetch it again if it was downloaded"
_CALLABLE = "give the function that makes the model, as package.module:make_model"
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1f\ufffd]")
_PROTOTXT = re.compile(r"(?m)^\s*(layers?\s*\{|input(_dim|_shape)?\s*[:{])")
_GLOBAL = re.compile(rb"c([\w.]+)\n([\w.]+)\n")
_WEIGHTS_ONLY = re.compile(r"torch|torch\._utils|torch\.storage|torch\.nn\.parameter|collections|torch\.serialization")
"""Modules whose names occur in a pickle of tensors."""
_KNOWN = ", ".join(FORMATS)
_OTHER_SUFFIXES = {
    ".caffemodel": "Caffe weights need the network: give the .prototxt file, with the .caffemodel beside it or as --weights",
    ".pdiparams": "Paddle weights need the program: give the .pdmodel or .json file beside it, or the folder",
    ".pdparams": "Paddle weights need the program: save the model with paddle.jit.save, and give its folder",
    ".ckpt": f"a checkpoint contains only weights: {_CALLABLE}",
    ".mlmodel": "Core ML models cannot be converted: convert the model that it was made from",
    ".mlpackage": "Core ML models cannot be converted: convert the model that it was made from",
    ".engine": "TensorRT engines cannot be converted: give the ONNX model that it was made from",
    ".plan": "TensorRT engines cannot be converted: give the ONNX model that it was made from",
    ".xml": "OpenVINO models cannot be converted: `penstock serve` and `penstock infer` run them without conversion",
    ".py": "Python code is converted as module:callable, such as net:make_model for a function make_model in net.py",
    ".ipynb": f"a notebook cannot be converted: {_CALLABLE}",
}
"""What to do with files that are no source, by suffix."""


def detect(path: Path) -> str:
    """The format of the model at ``path``, a key of ``FORMATS``. Raises NotFound, Unsupported, InvalidModel."""
    if not path.exists():
        raise NotFound(f"no model '{path}'", "check the path; a function in Python is given as package.module:function")
    try:
        found = _in_folder(path) if path.is_dir() else _in_file(path)
    except OSError as error:
        raise InvalidModel(f"cannot read model '{path}': {error.strerror or error}", "check its permissions") from None
    if found:
        return found
    raise Unsupported(f"'{path.name}' is not a model that Penstock recognises", _hint(path))


def _hint(path: Path) -> str:
    return _OTHER_SUFFIXES.get(
        path.suffix.lower(), f"if it is one, use `penstock convert --from FORMAT` with one of: {_KNOWN}"
    )


def _in_folder(path: Path) -> str:
    names = {file.name for file in path.iterdir()}
    if {"saved_model.pb", "saved_model.pbtxt"} & names:
        return "saved_model"
    if "config.json" in names:
        config = _json(path / "config.json")
        if "model_type" in config or "architectures" in config:
            return "huggingface"
    if "model.onnx" in names:
        return "onnx"
    suffixes = {Path(name).suffix for name in names}
    if ".pdmodel" in suffixes or "__model__" in names or (".pdiparams" in suffixes and ".json" in suffixes):
        return "paddle"
    if not names:
        raise InvalidModel(f"the folder '{path}' is empty", "check the path")
    if {"_CHECKPOINT_METADATA", "checkpoint", "_METADATA"} & names:
        raise Unsupported(f"the folder '{path.name}' is a checkpoint, which has weights but no model", _CALLABLE)
    raise Unsupported(
        f"the folder '{path.name}' is not a model that Penstock recognises",
        "a folder must be a SavedModel, a Hugging Face model (config.json) or a Paddle model; otherwise name the file",
    )


def _in_file(path: Path) -> str:
    if not path.is_file():
        raise InvalidModel(f"cannot read model '{path}': it is not a regular file", "check the path")
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        raise InvalidModel(f"model file '{path}' is empty", "export the model again")
    if head.startswith(b"version https://git-lfs"):
        raise InvalidModel(f"model file '{path}' is a Git LFS pointer, not the model", "fetch it with 'git lfs pull'")
    for begins, detected in _BEGINNINGS:
        if begins(head):
            return detected if isinstance(detected, str) else detected(path, head)
    return _text(path, head) or _protobuf(path)


def _zip(path: Path, head: bytes) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            inner = {name.partition("/")[2]: name for name in names if "/" in name}
            pickled = archive.open(inner["data.pkl"]).read(_MAX_FIELDS) if "data.pkl" in inner else b""
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, struct.error) as error:
        raise InvalidModel(f"'{path.name}' is a truncated or corrupt archive: {error}", _AGAIN) from None
    if "constants.pkl" in inner:
        return "torchscript"
    if "models/model.json" in inner or "serialized_exported_program.json" in {*names, *inner}:
        return "exported_program"
    if "data.pkl" in inner:
        return _pickled_torch(pickled)
    if {"config.json", "model.weights.h5"} <= set(names):
        return "keras"
    if "schema.json" in names:
        return "sklearn"
    return _other_zip(path, names)


def _other_zip(path: Path, names: list[str]) -> str:
    if "manifest.sha256" in names:
        raise Unsupported(f"'{path.name}' is a bundle, which is already built", "`penstock serve` and `infer` run it")
    if names and all(name.endswith(".npy") for name in names):
        raise Unsupported(f"'{path.name}' contains arrays, not a model", "give the model; arrays are given as --sample")
    if any(name.endswith(("saved_model.pb", ".onnx", "config.json")) for name in names):
        raise Unsupported(f"'{path.name}' is an archive with a model in it", "unpack it, and give the model in it")
    return ""


def _pickle(path: Path, head: bytes) -> str:
    if b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19" in head[:32]:  # the number with which torch.save began before torch 1.6
        return _pickled_torch(head)
    if path.suffix.lower() in (".pt", ".pth", ".bin", ".ckpt"):
        return "torch_pickle"
    return "sklearn"


def _pickled_torch(data: bytes) -> str:
    """``state_dict`` if ``data`` names only what weights need; the converter checks this again before it loads anything."""
    modules = {found[0].decode() for found in _GLOBAL.findall(data)}
    return "state_dict" if all(map(_WEIGHTS_ONLY.fullmatch, modules)) and b"\x93" not in data else "torch_pickle"


def _compressed(path: Path, head: bytes) -> str:
    if path.suffix.lower() in (".joblib", ".pkl", ".pickle"):
        return "sklearn"
    raise Unsupported(f"'{path.name}' is compressed", "unpack it, and give the model in it")


def _gguf(path: Path, head: bytes) -> str:
    raise Unsupported(
        f"'{path.name}' is a GGUF file, which contains weights but no model",
        "give the Hugging Face folder that it was made from",
    )


def _document(path: Path, head: bytes) -> str:
    """The format of a JSON or UBJSON file."""
    if re.match(
        rb"\{L.{8}(learner|version)", head, re.DOTALL
    ):  # UBJSON: an object whose first key has its length in 8 bytes
        return "xgboost"
    content = _json(path)
    keys = set(content)
    if "learner" in keys:
        return "xgboost"
    if {"features_info", "oblivious_trees"} & keys or "trees" in keys:
        return "catboost"
    if "program" in keys and "base_code" in keys:
        return "paddle"
    if "modelTopology" in keys:
        raise Unsupported(f"'{path.name}' is a model of TensorFlow.js", "give the Keras model that it was made from")
    if "class_name" in keys:
        raise Unsupported(f"'{path.name}' is a Keras model without weights", "save the model as NAME.keras")
    if "model_type" in keys or "architectures" in keys:
        raise Unsupported(
            f"'{path.name}' is the configuration of a Hugging Face model", "give the folder that it is in"
        )
    return ""


def _text(path: Path, head: bytes) -> str:
    text = head.decode("utf-8", "replace")
    if _BINARY.search(text[:-4]):  # the last character may be cut
        return ""
    if text.startswith("tree\n"):
        return "lightgbm"
    if _PROTOTXT.search(text) or path.suffix.lower() == ".prototxt":
        return "caffe"
    if path.suffix.lower() in (".pbtxt", ".textproto"):
        raise Unsupported(f"'{path.name}' is a graph as text, without weights", "give the binary file")
    refuse_declaration(path)
    raise Unsupported(f"'{path.name}' is a text, not a model", _hint(path))


def _protobuf(path: Path) -> str:
    """The format of a protobuf message, by the numbers of its fields."""
    kinds: dict[int, type] = {}
    fault, first = "", b""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        for number, value in itertools.islice(read_fields(memoryview(mapped)), _MAX_FIELDS):
            kinds.setdefault(number, int if isinstance(value, int) else bytes)
            if not first and isinstance(value, memoryview):
                first = bytes(value[:8])
    except ValueError as error:
        fault = str(error)
    found = _by_fields(kinds, first, path.suffix.lower())
    if fault and (found or path.suffix.lower() in (".onnx", ".pb", ".pdmodel", ".caffemodel")):
        raise InvalidModel(f"'{path.name}' is truncated or corrupt, or no model: {fault}", _AGAIN)
    return found


def _by_fields(kinds: dict[int, type], first: bytes, suffix: str) -> str:
    if kinds.get(1) is int and kinds.get(7) is bytes:
        return "onnx"
    if kinds.get(1) is int and kinds.get(2) is bytes and set(kinds) == {1, 2}:
        return "saved_model"
    if suffix == ".pdmodel" or (kinds.get(1) is bytes and first[:1] == b"\x08" and set(kinds) <= {1, 4, 5}):
        return "paddle"  # blocks, which begin with their number
    if kinds.get(1) is bytes and set(kinds) <= {1, 2, 3, 4, 5} and first[:1] == b"\x0a" and suffix != ".caffemodel":
        return "graph_def"  # nodes, which begin with their name
    return ""


def _json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"'{path.name}' is truncated or corrupt JSON: {error}", _AGAIN) from None
    if not isinstance(content, dict):
        raise Unsupported(f"'{path.name}' is JSON, but not a model", "check the path")
    return content


def _is_safetensors(head: bytes) -> bool:
    size = int.from_bytes(head[:8], "little")
    return 2 <= size < 100 << 20 and head[8:9] == b"{"


_BEGINNINGS: tuple[tuple[Callable[[bytes], bool], str | Callable[[Path, bytes], str]], ...] = (
    (lambda head: head.startswith(b"PK\3\4"), _zip),
    (lambda head: head.startswith(b"\x89HDF\r\n\x1a\n"), "keras"),
    (lambda head: head[4:8] == b"TFL3", "tflite"),
    (_is_safetensors, "state_dict"),
    (lambda head: head.startswith(b"CBM1"), "catboost"),
    (lambda head: head.startswith(b"GGUF"), _gguf),
    (lambda head: re.match(rb"\x80[\2-\5]", head) is not None, _pickle),
    (
        lambda head: head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")),
        _compressed,
    ),
    (lambda head: re.match(rb"x[\x01\x5e\x9c\xda]", head) is not None, _compressed),
    (lambda head: head.lstrip()[:1] == b"{", _document),
)
"""Tests of a file's first bytes, with the format, or the function that finds it."""
