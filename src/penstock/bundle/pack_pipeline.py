"""Pack a declared pipeline into one bundle: check it, pack its models, and record its examples."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from penstock.artifact import file_entries
from penstock.bundle.manifest import PackedModel, PipelineManifest, check_name, check_version
from penstock.bundle.open import Bundle, may_be_bundle, open_bundle
from penstock.bundle.pack import pack, write_zip
from penstock.bundle.pack_model import pack_model
from penstock.bundle.pipeline import EXAMPLES, FILES, GOLDEN, PIPELINE, facts_of, load_models, local_models
from penstock.errors import InvalidConfig, NotFound, PenstockError, PermissionDenied, prefixed
from penstock.pipeline.check import checked
from penstock.pipeline.declaration import Declaration, DeclaredInput, parse
from penstock.pipeline.direct import Direct
from penstock.pipeline.function import Function, MapStep
from penstock.pipeline.golden import Example, ExampleInput, Golden, observed, record
from penstock.pipeline.presence import check_presence
from penstock.pipeline.python_step import PythonStep
from penstock.pipeline.source import MAX_BYTES, read_source
from penstock.pipeline.steps.base import StepResources
from penstock.pipeline.value import Media, read_array
from penstock.resources import machine_facts
from penstock.storage.base import is_contained
from penstock.tensor import DataType, to_wire
from penstock.version import __version__

_PACKAGES = ("numpy", "onnxruntime", "opencv-python-headless", "pillow", "simplejpeg", "tokenizers", "av")
"""Packages whose versions may change the results of steps."""
_MAX_FILE_BYTES = 256 << 20
"""Maximum size of an example, a list of labels, or a file that a step reads."""


class FolderFiles(Mapping[str, bytes]):
    """The files of the declaration's folder, by path. ``read`` has those that were asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.read: dict[str, bytes] = {}

    def __getitem__(self, path: str) -> bytes:
        if path not in self.read:
            if not _is_below(self._folder, path) or not (self._folder / path).is_file():
                raise KeyError(path)
            self.read[path] = _content(self._folder, path)
        return self.read[path]

    def __iter__(self) -> Iterator[str]:
        return (path.relative_to(self._folder).as_posix() for path in self._folder.iterdir() if path.is_file())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class PackedPipeline(msgspec.Struct, frozen=True):
    """A pipeline that was packed."""

    manifest: PipelineManifest
    function: Function
    examples: int


def pack_pipeline(
    declaration: str | Path,
    target: str | Path,
    *,
    overwrite: bool = False,
    allow_python: bool = False,
    version: str = "1",
) -> PackedPipeline:
    """Check the pipeline in the file ``declaration``, record its examples, and write its bundle to ``target``.

    Models that are no bundles are packed unchanged. Raises NotFound, InvalidConfig with line and fix, PermissionDenied if the pipeline
    has Python steps and ``allow_python`` is false, AlreadyExists, and the errors of ``pack_model`` and of the steps.
    """
    path = Path(declaration)
    declared = read_declaration(path)
    check_name(declared.name)
    check_version(version)
    labels = {name: _labels(declared, path.parent, name) for name in declared.labels}
    resources = StepResources(labels, files := FolderFiles(path.parent))
    with tempfile.TemporaryDirectory() as folder:
        models = {name: _model(declared, path.parent, name, Path(folder)) for name in declared.models}
        function = checked(declared, {name: facts_of(one) for name, one in models.items()}, resources, allow_python)
        check_presence(declared, function)
        packed = {f"models/{name}.bundle": _whole(one, Path(folder)) for name, one in models.items()}
    python = _python_files(function)
    if python and not allow_python:
        raise PermissionDenied(
            f"{path.name} runs Python code: {', '.join(sorted(python))}", "if you trust it, add --allow-python"
        )
    own = {FILES + name: data for name, data in files.read.items()}
    if declared.examples:
        golden, samples = _record(declared, path.parent, function, models)
        own |= samples | {GOLDEN: msgspec.json.encode(golden, order="sorted")}
    inner = {name: PackedModel(f"models/{name}.bundle", one.digest) for name, one in models.items()}
    canonical = msgspec.structs.replace(
        declared, labels=labels, examples=(), models={name: one.file for name, one in inner.items()}
    )
    everything = packed | own | {PIPELINE: msgspec.json.encode(canonical.to_data())}
    manifest = PipelineManifest(
        name=declared.name,
        version=version,
        description=declared.description,
        golden=GOLDEN if declared.examples else "",
        models=inner,
        python=tuple(sorted(FILES + name for name in python)),
        machine=machine_facts(),
        files=file_entries(everything),
        tools={"penstock": __version__, **dict(_versions())},
    )
    pack(manifest, everything, Path(target), overwrite=overwrite)
    return PackedPipeline(manifest, function, len(declared.examples))


def read_declaration(path: Path) -> Declaration:
    """The declaration in the file ``path``. Raises NotFound, InvalidConfig."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise InvalidConfig(f"cannot read '{path}': it is not a file")
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"no file '{path}'", "name the declaration of a pipeline, e.g. pipeline.yaml") from None
    except OSError as error:
        raise InvalidConfig(f"cannot read '{path}': {error.strerror}") from None
    return parse(read_source(text, path.name))


def _model(declared: Declaration, folder: Path, name: str, scratch: Path) -> Bundle:
    """The model ``name`` as a bundle."""
    file = declared.models[name]
    _check_place(declared, folder, ("models", name), "model", file)
    try:
        if may_be_bundle(folder / file):
            return open_bundle(folder / file)
        pack_model(folder / file, scratch / f"{name}.bundle", name=name)
        return open_bundle(scratch / f"{name}.bundle")
    except PenstockError as error:
        raise prefixed(f"model '{name}': ", error) from error


def _whole(bundle: Bundle, scratch: Path) -> bytes:
    """``bundle`` as one file."""
    if bundle.path.is_file():
        return bundle.path.read_bytes()
    entries = {
        path.relative_to(bundle.path).as_posix(): path.read_bytes() for path in bundle.path.rglob("*") if path.is_file()
    }
    write_zip(scratch / "whole.bundle", entries)
    return (scratch / "whole.bundle").read_bytes()


def _labels(declared: Declaration, folder: Path, name: str) -> tuple[str, ...]:
    given = declared.labels[name]
    if not isinstance(given, str):
        return given
    try:
        text = _file(declared, folder, ("labels", name), given).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise declared.error(("labels", name), f"'{given}' is not UTF-8 text") from None
    return tuple(text.splitlines())


def _is_below(folder: Path, file: str) -> bool:
    """True if ``file`` is below ``folder``, also if it is a link, so that no foreign folder puts private files in a bundle."""
    return is_contained(file) and (folder / file).resolve().is_relative_to(folder.resolve())


def _file(declared: Declaration, folder: Path, place: tuple[str | int, ...], file: str) -> bytes:
    _check_place(declared, folder, place, "file", file)
    return _content(folder, file)


def _content(folder: Path, file: str) -> bytes:
    if (size := (folder / file).stat().st_size) > _MAX_FILE_BYTES:
        raise InvalidConfig(f"'{file}' has {size} bytes, but a file of a pipeline has at most {_MAX_FILE_BYTES} bytes")
    return (folder / file).read_bytes()


def _check_place(declared: Declaration, folder: Path, place: tuple[str | int, ...], what: str, file: str) -> None:
    """Raises InvalidConfig unless ``file`` exists below ``folder``; only a model may be a folder."""
    found = folder / file
    if not _is_below(folder, file):
        raise declared.error(place, f"the {what} '{file}' is not below the folder of this file", "copy it there")
    if not found.exists() or (what == "file" and not found.is_file()):
        raise declared.error(place, f"there is no {what} '{file}'", "write its path below the folder of this file")


def _python_files(function: Function) -> set[str]:
    found = set[str]()
    for work in function.work.values():
        if isinstance(work, PythonStep):
            found.add(work.file)
        elif isinstance(work, MapStep):
            found |= _python_files(work.inner)
    return found


def _record(
    declared: Declaration, folder: Path, function: Function, models: Mapping[str, Bundle]
) -> tuple[Golden, dict[str, bytes]]:
    """The golden samples, and the files of the examples."""
    loaded = load_models(models)
    try:
        runner = Direct(observed(function), local_models(models, loaded))
        examples, files = [], {}
        for number in range(len(declared.examples)):
            inputs, own = _example(declared, folder, number)
            files.update(own)
            try:
                values = record(runner, {name: one.value(own) for name, one in inputs.items()})
            except PenstockError as error:
                raise prefixed(f"example {number + 1}: ", error) from error
            examples.append(Example(inputs, values))
        return Golden(tuple(examples), {name: one.variant.name for name, one in loaded.items()}), files
    finally:
        for one in loaded.values():
            one.loaded.unload()


def _example(declared: Declaration, folder: Path, number: int) -> tuple[dict[str, ExampleInput], dict[str, bytes]]:
    """The inputs of an example, and its files."""
    inputs, files = {}, {}
    given = declared.examples[number]
    for name in declared.inputs:
        if name not in given:
            raise declared.error(("examples", number), f"the example lacks the input '{name}'", f"write {name}: …")
    for name, value in given.items():
        place = ("examples", number, name)
        if name not in declared.inputs:
            raise declared.error(place, f"there is no input '{name}'", f"the inputs are {', '.join(declared.inputs)}")
        kind = declared.inputs[name]
        if kind.media is Media.TENSOR:
            inputs[name] = _tensor(declared, place, kind, value)
        elif not isinstance(value, str):
            raise declared.error(
                place, f"input '{name}' must be {'a text' if kind.media is Media.TEXT else 'the path of a file'}"
            )
        elif kind.media is Media.TEXT:
            inputs[name] = ExampleInput(text=value)
        else:
            path = f"{EXAMPLES}{number + 1}/{name}{Path(value).suffix.lower()}"
            files[path] = _file(declared, folder, place, value)
            inputs[name] = ExampleInput(file=path)
    return inputs, files


def _tensor(declared: Declaration, place: tuple[str | int, ...], kind: DeclaredInput, value: Any) -> ExampleInput:
    datatype = kind.datatype or DataType.FP32
    try:
        array = read_array(value, datatype)
    except ValueError as error:
        raise declared.error(place, f"the value is not an array of {datatype.value}: {error}") from None
    if len(array.shape) != len(kind.shape) or any(
        want not in (-1, got) for want, got in zip(kind.shape, array.shape, strict=True)
    ):
        raise declared.error(place, f"the value has the shape {list(array.shape)}, not {list(kind.shape)}")
    return ExampleInput(array=bytes(to_wire(array)), datatype=datatype, shape=array.shape)


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
