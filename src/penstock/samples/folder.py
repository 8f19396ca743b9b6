"""Samples in a folder, one file for each: npz, npy for a model with one input, images, or sounds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.dataset import LABELS, Dataset
from penstock.errors import InvalidData, printable
from penstock.samples import audio, images
from penstock.samples.gather import Gathering
from penstock.samples.hints import ImageForm, InputHints, SoundForm
from penstock.samples.npz import read_npy, read_npz
from penstock.samples.sequences import SEQUENCE, has_sequences
from penstock.samples.spool import Spool
from penstock.tensor import Array, Signature

_log = logging.getLogger(__name__)

_AS_ARRAYS = "give arrays in npz files; only the commands that build or compress read images and sounds"
_KINDS = (
    {".npz": "npz", ".npy": "npy"} | dict.fromkeys(images.SUFFIXES, "image") | dict.fromkeys(audio.SUFFIXES, "sound")
)
"""The kind of a file by its suffix."""
_MEDIA = frozenset({"image", "sound"})
_SPOOLED_BYTES = 256 << 20
"""Maximum size of samples that are copied to a temporary file."""
_NAMED = 3
"""Maximum number of names in a message."""


def read_folder(
    folder: Path, signature: Signature, *, independent: bool = False, hints: InputHints | None = None
) -> Dataset:
    """The samples of all files of one kind in ``folder`` and its subfolders, sorted by path. Hidden files are skipped.

    Other files are skipped with a warning. Samples are read from their files whenever they are needed or, if they are small together,
    from a temporary file, which is faster. If files lack the states of a model, each subfolder is a sequence. If images or sounds are
    in several subfolders, each subfolder is a class.

    Raises InvalidData, ResourceExhausted, Unsupported.
    """
    files = sorted(_files(folder))
    paths = [path for path in files if path.suffix.lower() in _KINDS and not _leads_outside(folder, path)]
    if not paths:
        raise InvalidData(
            f"folder '{folder}' has no npz, npy, image or sound files",
            "give a folder with one npz file per sample, written by numpy.savez",
        )
    kinds = list(dict.fromkeys(_KINDS[path.suffix.lower()] for path in paths))
    if not _MEDIA.issuperset(kinds):  # pictures beside arrays are illustrations
        kinds = [kind for kind in kinds if kind not in _MEDIA]
        paths = [path for path in paths if _KINDS[path.suffix.lower()] in kinds]
    if len(kinds) > 1:
        raise InvalidData(f"folder '{folder}' has both {kinds[0]} and {kinds[1]} files", "keep one kind in a folder")
    if others := [printable(str(path.relative_to(folder))) for path in files if path not in set(paths)]:
        shown = ", ".join(others[:_NAMED]) + (", …" if len(others) > _NAMED else "")
        _log.warning("'%s': %d file(s) that are not %s are ignored: %s", folder, len(others), kinds[0], shown)
    read = _reader(folder, kinds[0], signature, hints)
    states = hints.states if hints else {}
    classes = _classes(folder, paths) if kinds[0] in _MEDIA and not states else {}

    def arrays(path: Path) -> Mapping[str, Array]:
        found = read(path)
        if classes:
            return {**found, LABELS: np.array(classes[path.relative_to(folder).parts[0]])}
        is_grouped = not states.keys() <= found.keys() and path.parent != folder
        return {SEQUENCE: np.array(path.parent.relative_to(folder).as_posix()), **found} if is_grouped else found

    gathering = Gathering(signature, independent=independent, hints=hints)
    first = arrays(paths[0])
    size = sum(path.stat().st_size for path in paths)
    if kinds[0] in _MEDIA:
        size = len(paths) * sum(array.nbytes for array in first.values())
    if has_sequences(first, signature, hints) or size <= _SPOOLED_BYTES:
        spool = Spool()
        for path in paths:
            spool.add(gathering.add(arrays(path), f"'{printable(str(path))}'"))
        return gathering.finish(spool.read, f"'{folder}'")
    for path in paths:
        gathering.add(arrays(path), f"'{printable(str(path))}'")
    return gathering.finish(lambda number: gathering.call_of(arrays(paths[number])), f"'{folder}'")


def _reader(
    folder: Path, kind: str, signature: Signature, hints: InputHints | None
) -> Callable[[Path], Mapping[str, Array]]:
    """A function that reads a file of this kind. Raises InvalidData if the model takes other data."""
    if kind == "npz":
        return read_npz
    specs, states = {spec.name: spec for spec in signature.inputs}, hints.states if hints else {}
    if kind == "npy":
        names = [name for name in specs if name not in states]
        if len(names) > 1:
            raise InvalidData(
                f"folder '{folder}' has npy files, which hold one array, but the model has the inputs {names}",
                "give npz files with an array for each input",
            )
        return lambda path: {names[0]: read_npy(path)}
    form = None if hints is None else hints.images if kind == "image" else hints.sounds
    given = {form.name, *states, *((form.rate,) if isinstance(form, SoundForm) else ())} if form else set()
    if form is None or (missing := sorted(specs.keys() - given)):
        cause = (
            f"they give no value for the inputs {missing}" if form else "no input of the model is known to take them"
        )
        raise InvalidData(
            f"folder '{folder}' has {kind} files, but {cause}",
            _AS_ARRAYS,
        )
    spec = specs[form.name]
    if isinstance(form, ImageForm):
        _log.warning("'%s': %s", folder, images.assumed(spec, form))
        return lambda path: {form.name: images.read_image(path, spec, form)}
    _log.warning("'%s': %s", folder, audio.assumed(spec, form))
    return lambda path: audio.as_inputs(path, audio.read_sound(path), spec, form, specs.get(form.rate))


def _classes(folder: Path, paths: Sequence[Path]) -> dict[str, int]:
    """The class number of each subfolder: its name if all names are numbers, otherwise its place in order; empty if the files are not
    all in subfolders, of which there are several.
    """
    names = sorted({parts[0] if len(parts := path.relative_to(folder).parts) > 1 else "" for path in paths})
    if "" in names or len(names) < 2:
        return {}
    is_number = all(name.isascii() and name.isdigit() for name in names)
    found = {name: int(name) if is_number else number for number, name in enumerate(names)}
    shown = ", ".join(f"{number} {printable(name)}" for name, number in [*found.items()][:_NAMED])
    _log.warning("'%s': its %d subfolders are the labels: %s, …", folder, len(found), shown)
    return found


def _files(folder: Path) -> Iterator[Path]:
    """All files below ``folder`` that are not hidden. Links to folders are not followed."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in files if not name.startswith("."))


def _leads_outside(folder: Path, path: Path) -> bool:
    """True if ``path`` is named like an image or a sound, but is no file, or is a link to a file outside of ``folder``."""
    if _KINDS[path.suffix.lower()] not in _MEDIA:
        return False
    return not path.is_file() or (path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()))
