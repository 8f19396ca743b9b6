"""Source: what a user gives to ``penstock convert``, resolved to a file, a folder or an object, with its format."""

from __future__ import annotations

import hashlib
import inspect
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.artifact import Artifact, Format, format_of, local_path, sha256_of_file
from penstock.config import did_you_mean
from penstock.errors import InvalidArgument, InvalidData, InvalidModel, NotFound, PenstockError, Unsupported, quoted
from penstock.offline.convert.base import FrameworkModel
from penstock.offline.convert.detect import detect
from penstock.offline.convert.registry import FORMATS
from penstock.samples.user_code import apart_from_output, is_function, load_object
from penstock.tensor import Array, DataType

CUSTOM = "custom"
"""Format of objects that implement ``FrameworkModel``."""
_CLASSES = (
    ("torch.jit", "torchscript"),
    ("torch.export", "exported_program"),
    ("transformers.modeling_utils", "huggingface"),
    ("torch.nn.modules.module", "torch"),
    ("tensorflow", "saved_model"),
    ("keras", "keras"),
    ("flax", "jax"),
    ("jax", "jax"),
    ("jaxlib", "jax"),
    ("xgboost", "xgboost"),
    ("lightgbm", "lightgbm"),
    ("catboost", "catboost"),
    ("sklearn", "sklearn"),
    ("paddle", "paddle"),
    ("onnx", "onnx"),
)
"""Modules of the base classes of models, with the format. The most derived class decides."""
_WEIGHTS = {"caffe": (".caffemodel",), "paddle": (".pdiparams",)}
"""Suffixes of the files that belong to a model file."""
_ALIKE = ({"sklearn", "torch_pickle"}, {"sklearn", "state_dict"}, {"graph_def", "paddle"})
"""Formats whose files can look the same."""
_MAX_FILES = 10_000
_GIVE = "give a file, a folder, or a function as package.module:function"


class ResolvedSource(msgspec.Struct, frozen=True):
    """A source. ``given`` is a path, or an object of the framework."""

    format: str
    given: Any
    name: str
    """For messages: the file name, the function or the class."""
    files: tuple[Path, ...] = ()
    """All files of the source; empty for an object."""

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def companions(self) -> tuple[Path, ...]:
        """Files in the source's folder that belong beside the ONNX model, such as those of a tokenizer."""
        if not self.files or not Path(self.given).is_dir():
            return ()
        beside = (Path(self.given, name) for name in FORMATS[self.format].companions)
        return tuple(file for file in beside if file.is_file())

    def digest(self) -> str:
        """SHA-256 of the names and contents of all files; empty for an object."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name} {sha256_of_file(file)[0]}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest() if self.files else ""


def resolve(given: Any, format: str = "", weights: Path | None = None) -> ResolvedSource:
    """Find the source: a path, ``module:function``, or an object. ``format`` replaces the detected format.

    Raises NotFound, InvalidArgument, InvalidModel, Unsupported.
    """
    if format and format not in FORMATS:
        raise InvalidArgument(f"there is no format '{format}'", did_you_mean(format, FORMATS))
    if weights is not None and not weights.is_file():
        raise NotFound(f"no file '{weights}' with weights", "check --weights")
    if isinstance(given, Artifact) and given.path is not None:
        given = given.path
    if not isinstance(given, str | os.PathLike):
        return _object(given, format, type(_module_of(given)).__name__, weights)
    given = os.fspath(given)
    if is_function(given):
        return _object(_called(given), format, given, weights)
    return _file(local_path(given), format, weights)


def read_sample(given: Any) -> dict[str, Array]:
    """The arrays of one call: an npz file, or a mapping from names to arrays or tensors. Raises InvalidData, NotFound."""
    if isinstance(given, str | os.PathLike):
        given = _npz(Path(given))
    if not isinstance(given, Mapping):
        raise InvalidData(
            f"a sample must be a mapping from input names to arrays, got {type(given).__name__}",
            "give sample={'image': array}",
        )
    found: dict[str, Array] = {}
    for name, value in given.items():
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        try:
            datatype = DataType.from_numpy(array.dtype)
        except Unsupported as error:
            raise InvalidData(f"the sample's input {quoted(str(name))}: {error.message}", error.hint) from None
        found[str(name)] = np.ascontiguousarray(array, datatype.dtype).reshape(array.shape)
    return found


def _npz(path: Path) -> dict[str, Array]:
    if not path.exists():
        raise NotFound(f"no sample '{path}'", "check the path")
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ValueError("it is a single array without a name")
        with file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # noqa: BLE001 - numpy and zipfile raise many kinds
        hint = "write it with np.savez, with one array for each input of one call"
        raise InvalidData(f"'{path}' is not an npz file of arrays: {error}", hint) from None


def _file(path: Path, format: str, weights: Path | None) -> ResolvedSource:
    detected = _claimed(path, format) if format else detect(path)
    if detected == "state_dict":
        raise InvalidArgument(
            f"'{path.name}' contains weights, but no model",
            f"name the function that makes the module: penstock convert package.module:make_model --weights {path.name}",
        )
    if detected == "onnx" and format_of(path) is not Format.ONNX:
        raise InvalidArgument(
            f"'{path.name}' is an ONNX model, but not named like one", f"rename it to {path.stem}.onnx"
        )
    try:
        files = (*_files(path, detected), *([weights] if weights else []))
    except OSError as error:
        raise InvalidModel(f"cannot read model '{path}': {error.strerror or error}", "check its permissions") from None
    return ResolvedSource(detected, path, path.name, files)


def _claimed(path: Path, format: str) -> str:
    """The user's ``format``. Raises InvalidArgument if the content of ``path`` shows that it has another one."""
    if not path.exists():
        raise NotFound(f"no model '{path}'", "check the path")
    entry = FORMATS[format]
    if format == "jax":
        raise InvalidArgument(f"'{path.name}' is a file, and JAX has no files of models", _GIVE)
    if format == "huggingface" and not path.is_dir():
        raise InvalidArgument(
            f"'{path.name}' is a file, not a {entry.title}", "give the folder that contains config.json"
        )
    try:
        found = detect(path)
    except PenstockError:
        return format  # the converter says what is wrong with the file
    if entry.framework != FORMATS[found].framework and {format, found} not in _ALIKE:
        raise InvalidArgument(
            f"'{path.name}' has the format {found} ({FORMATS[found].title}), not {format}", f"leave out --from {format}"
        )
    return format


def _files(path: Path, format: str) -> Iterator[Path]:
    """The files of the model at ``path``, in a stable order."""
    if format == "onnx":
        artifact = Artifact.from_file(path)
        main = artifact.path or path
        yield from (main, *(main.parent / entry.path for entry in artifact.beside))
    elif path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file())
        if len(found) > _MAX_FILES:
            raise InvalidModel(f"model folder '{path}' contains more than {_MAX_FILES} files", "check the path")
        yield from found
    else:
        yield path
        yield from (
            path.with_suffix(suffix) for suffix in _WEIGHTS.get(format, ()) if path.with_suffix(suffix).exists()
        )


def _object(given: Any, format: str, name: str, weights: Path | None) -> ResolvedSource:
    found = format or _format_of_object(given)
    if not found:
        raise Unsupported(
            f"'{name}' is of type {type(given).__name__}, which is not a model that Penstock recognises",
            f"{_GIVE} of a module, an estimator or a JAX function; or name its format with --from",
        )
    if found == "torch" and weights is not None:
        found = "state_dict" if not format else found
    return ResolvedSource(found, given, name)


def _format_of_object(given: Any) -> str:
    """The format of an object, by its base classes; empty if unknown. A function that takes arguments is one of JAX."""
    if isinstance(given, FrameworkModel):
        return CUSTOM
    for cls in type(_module_of(given)).__mro__:
        for module, format in _CLASSES:
            if f"{cls.__module__}.".startswith(f"{module}."):
                return format
    return "jax" if callable(given) and not isinstance(given, type) else ""


def _module_of(given: Any) -> Any:
    """The module of ``(module, variables)``, which is how Flax's linen gives a model; otherwise, ``given``."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        classes = type(given[0]).__mro__
        return given[0] if any(cls.__module__.startswith("flax.linen.") for cls in classes) else given
    return given


def _called(name: str) -> Any:
    """The model that ``module:function`` names: the result of a function or a class without arguments, or the object itself."""
    found = load_object(name, "model")
    if not (inspect.isfunction(found) or inspect.isclass(found)) or _required(found):
        return found
    try:
        with chdir("."), apart_from_output():
            return found()
    except (PenstockError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - the user's function may raise SystemExit
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise InvalidArgument(
            f"'{name}' raised {type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})",
            "correct the function; it must return the model",
        ) from None


def _required(function: Any) -> bool:
    """True if ``function`` cannot be called without arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(one.default is inspect.Parameter.empty and one.kind not in optional for one in parameters)
