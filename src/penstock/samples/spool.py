"""A temporary file that holds the arrays of samples, so that samples which can be read only once can be read again."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import weakref
from array import array as numbers
from collections.abc import Mapping
from typing import IO

import numpy as np

from penstock.errors import ResourceExhausted
from penstock.tensor import Array, DataType, from_wire, to_wire

_Form = tuple[tuple[str, DataType, tuple[int, ...]], ...]
"""The name, type and shape of each array of a sample."""

_log = logging.getLogger(__name__)

_STEP = 64 << 20
"""The room on the disk is checked after this many bytes."""
_RESERVE = 1 << 30
"""Bytes on the disk that are left to others, but at most a tenth of it."""
_LARGE = 4 << 30
"""Size of a file that is worth a warning."""
_ELSEWHERE = "set the environment variable TMPDIR to a folder with more space, or give a folder of npz files, which are not copied"


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # the disk may be full
        file.close()


class Spool:
    """Holds samples in the order in which they are added. The file has no name, and disappears with this object."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="penstock-")  # noqa: SIM115 - it lives as long as this object
        weakref.finalize(self, _close, self._file)
        self._starts, self._ends = numbers("q"), numbers("q")
        """Where each sample starts, and where each of its arrays ends."""
        self._forms: dict[_Form, int] = {}
        self._form_of = numbers("q")
        self._first = numbers("q")
        """For each sample, the place of its first array in ``_ends``."""
        self._listed: list[_Form] = []
        self._checked = 0
        """Size of the file up to which there is known to be room."""

    def add(self, arrays: Mapping[str, Array]) -> None:
        """Add one sample. Raises ResourceExhausted if the disk is full."""
        end = self._ends[-1] if self._ends else 0
        self._starts.append(end)
        self._first.append(len(self._ends))
        size = sum(array.nbytes for array in arrays.values())
        try:
            if end + size > self._checked:
                self._check_room(end, size)
            self._file.seek(end)
            for array in arrays.values():
                end += self._file.write(to_wire(array))
                self._ends.append(end)
            self._file.flush()
        except OSError as error:
            raise ResourceExhausted(
                f"the samples do not fit in the temporary folder '{tempfile.gettempdir()}': {error.strerror}",
                _ELSEWHERE,
            ) from error
        form = tuple((name, DataType.from_numpy(array.dtype), array.shape) for name, array in arrays.items())
        if form not in self._forms:
            self._forms[form] = len(self._listed)
            self._listed.append(form)
        self._form_of.append(self._forms[form])

    def _check_room(self, end: int, size: int) -> None:
        """Check that the next samples leave the disk its reserve, and say once what a large file costs. Raises ResourceExhausted."""
        folder = tempfile.gettempdir()
        usage = shutil.disk_usage(folder)
        step, reserve = size + _STEP, min(_RESERVE, usage.total // 10)
        if usage.free - size < reserve:
            raise ResourceExhausted(
                f"the samples do not fit in the temporary folder '{folder}': they take more than {end / 2**30:.1f} GiB, and "
                f"{usage.free / 2**30:.1f} GiB are left",
                _ELSEWHERE,
            )
        if self._checked <= _LARGE < end + step:
            _log.warning(
                "samples that can be read only once are copied to the temporary folder '%s', where they take more than %.0f GiB until "
                "the end of the command; %.0f GiB are left. A folder of npz files is not copied",
                *(folder, _LARGE / 2**30, usage.free / 2**30),
            )
        self._checked = end + step

    def read(self, number: int) -> dict[str, Array]:
        """The arrays of a sample."""
        start, found = self._starts[number], {}
        self._file.seek(start)
        for place, (name, datatype, shape) in enumerate(self._listed[self._form_of[number]], self._first[number]):
            # A copy, because the buffer of bytes need not be aligned for the type.
            found[name] = np.array(from_wire(self._file.read(self._ends[place] - start), datatype, shape))
            start = self._ends[place]
        return found
