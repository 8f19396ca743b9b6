"""Reads npz and npy files without Python objects. Arrays of large files are memory-mapped, so they need no memory."""

from __future__ import annotations

import struct
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from penstock.errors import InvalidData, NotFound, PenstockError
from penstock.tensor import Array

_MAGICS = b"\x93NUMPY", b"PK"
"""First bytes of an npy file (a single array) and of an npz file. numpy would unpickle any other file."""
_SAVE = "write the file with numpy.savez, without Python objects"
_MAPPED_BYTES = 64 << 20
"""Arrays of this size are mapped. Smaller arrays are read, which is faster."""
_CHUNK = 1 << 20
_HEADER = struct.Struct("<26xHH")
"""The end of a zip entry's local header: the lengths of its name and of its extra field, which precede the data."""


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of an npz file by name. Raises NotFound, and InvalidData if the file is not an npz file or is damaged."""
    with _opened(path) as file:
        with np.load(file, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InvalidData(f"'{path}' contains a single array, not an npz archive", "write it with numpy.savez")
            assert archive.zip is not None
            infos = {info.filename.removesuffix(".npy"): info for info in archive.zip.infolist()}
            if len(infos) < len(archive.zip.infolist()):
                raise InvalidData(f"'{path}' has several arrays of one name", "write it with numpy.savez")
            large = {name for name, info in infos.items() if info.file_size >= _MAPPED_BYTES}
            arrays = {
                name: _large(archive.zip, infos[name], file) if name in large else archive[name]
                for name in archive.files
            }
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise InvalidData(f"'{path}' is a zip archive, but not of numpy arrays", "write it with numpy.savez")
        return arrays


def read_npy(path: Path) -> Array:
    """The array of an npy file. Raises NotFound, and InvalidData if the file is not an npy file or is damaged."""
    with _opened(path) as file:
        found = np.load(file, allow_pickle=False)
        if not isinstance(found, np.ndarray):
            raise InvalidData(f"'{path}' is an npz archive, not an npy file", "rename it to .npz")
        return found


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file whose first bytes are those of an npy or npz file. Errors of reading are raised as InvalidData."""
    try:
        if path.is_fifo():  # opening it would wait for a writer
            raise InvalidData(f"cannot read '{path}': it is a pipe, in which numpy cannot seek", _SAVE)
        # Open the file here, because numpy does not close its own file if the archive is damaged.
        with path.open("rb") as file:
            if not file.read(len(_MAGICS[0])).startswith(_MAGICS):
                raise InvalidData(f"cannot read '{path}': it is not an npz file", _SAVE)
            file.seek(0)
            yield file
    except FileNotFoundError:
        raise NotFound(f"no data file '{path}'", "check the path") from None
    except PenstockError:
        raise
    except Exception as error:  # noqa: BLE001 - numpy and zipfile raise arbitrary exceptions for damaged or forged files
        raise InvalidData(f"cannot read '{path}': {error}", _SAVE) from None


def _large(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: IO[bytes]) -> Array:
    """A memory-mapped array of an archive, after a check of its CRC. A compressed array is first expanded into a temporary file."""
    is_stored = info.compress_type == zipfile.ZIP_STORED
    with archive.open(info) as entry, tempfile.TemporaryFile() as expanded:
        while chunk := entry.read(_CHUNK):  # the last read checks the CRC
            if not is_stored:
                expanded.write(chunk)
        if not is_stored:
            expanded.seek(0)
            return _mapped(expanded, info.file_size)
    file.seek(info.header_offset)
    name, extra = _HEADER.unpack(file.read(_HEADER.size))
    file.seek(name + extra, 1)
    return _mapped(file, info.file_size)


def _mapped(file: IO[bytes], size: int) -> Array:
    """The array in the npy format at the position of ``file``, where it takes ``size`` bytes, mapped."""
    start = file.tell()
    version = np.lib.format.read_magic(file)
    read_header: Any = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ValueError(f"npy version {version} cannot be mapped")
    shape, is_fortran, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
    needed = file.tell() - start + dtype.itemsize * int(np.prod(shape, dtype=object))
    if needed != size:
        raise ValueError(f"an array of shape {list(shape)} needs {needed} bytes, but has {size}")
    order: Any = "F" if is_fortran else "C"
    return np.memmap(file, dtype, "r", offset=file.tell(), shape=shape, order=order)
