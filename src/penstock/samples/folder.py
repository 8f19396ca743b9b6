"""Samples in a folder: one npz file for each sample or, for a model with one input, one npy file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from penstock.dataset import Dataset
from penstock.errors import InvalidData
from penstock.samples.gather import Gathering
from penstock.samples.npz import read_npy, read_npz
from penstock.samples.sequences import SEQUENCE, Feedback, has_sequences
from penstock.samples.spool import Spool
from penstock.tensor import Array, Signature

_log = logging.getLogger(__name__)

_SUFFIXES = ".npz", ".npy"
_SPOOLED_BYTES = 256 << 20
"""Maximum size of files that are copied to a temporary file."""
_NAMED = 3
"""Maximum number of ignored files to name."""


def read_folder(
    folder: Path, signature: Signature, *, independent: bool = False, feedback: Feedback | None = None
) -> Dataset:
    """The samples of all npz or npy files in ``folder`` and its subfolders, sorted by path. Hidden files are skipped.

    Other files are skipped with a warning. Samples are read from their files whenever they are needed or, if they are small together,
    from a temporary file, which is faster. If files lack the states of a model, each subfolder is a sequence.

    Raises InvalidData, ResourceExhausted.
    """
    files = sorted(_files(folder))
    paths = [path for path in files if path.suffix in _SUFFIXES]
    if not paths:
        raise InvalidData(
            f"folder '{folder}' has no npz or npy files",
            "give a folder with one npz file per sample, written by numpy.savez",
        )
    suffixes = {path.suffix for path in paths}
    if len(suffixes) > 1:
        raise InvalidData(f"folder '{folder}' has both npz and npy files", "keep one kind in a folder")
    states = feedback.states if feedback else {}
    names = [name for name in signature.input_names if name not in states or suffixes == {".npz"}]
    if suffixes == {".npy"} and len(names) > 1:
        raise InvalidData(
            f"folder '{folder}' has npy files, which hold one array, but the model has the inputs {names}",
            "give npz files with an array for each input",
        )
    if others := [path.relative_to(folder).as_posix() for path in files if path.suffix not in _SUFFIXES]:
        shown = ", ".join(others[:_NAMED]) + (", …" if len(others) > _NAMED else "")
        _log.warning("'%s': %d file(s) that are not %s are ignored: %s", folder, len(others), *suffixes, shown)

    def arrays(path: Path) -> Mapping[str, Array]:
        found = read_npz(path) if path.suffix == ".npz" else {names[0]: read_npy(path)}
        is_grouped = not states.keys() <= found.keys() and path.parent != folder
        return {SEQUENCE: np.array(path.parent.relative_to(folder).as_posix()), **found} if is_grouped else found

    gathering = Gathering(signature, independent=independent, feedback=feedback)
    if (
        has_sequences(arrays(paths[0]), signature, feedback)
        or sum(path.stat().st_size for path in paths) <= _SPOOLED_BYTES
    ):
        spool = Spool()
        for path in paths:
            spool.add(gathering.add(arrays(path), f"'{path}'"))
        return gathering.finish(spool.read, f"'{folder}'")
    for path in paths:
        gathering.add(arrays(path), f"'{path}'")
    return gathering.finish(lambda number: gathering.call_of(arrays(paths[number])), f"'{folder}'")


def _files(folder: Path) -> Iterator[Path]:
    """All files below ``folder`` that are not hidden. Links to folders are not followed."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in files if not name.startswith("."))
