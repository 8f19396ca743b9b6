"""Tensors in memory that two processes share. One process replaces the tensors for every call. The other process reads them.

The memory is a memfd that only grows, by doubling. It is sealed against shrinking, so reading tensors cannot raise SIGBUS.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np

from penstock.errors import PenstockError, ResourceExhausted
from penstock.tensor import Array, DataType, from_wire, to_wire

_FIRST_BYTES = 64 << 10
_MAX_BYTES = 8 << 30
_ALIGNMENT = 64
"""Alignment of tensors: one cache line, which also suits vector instructions."""


class TensorSlot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The location of a tensor in the arena. BYTES tensors are stored in their wire form."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    offset: int
    byte_size: int


class TensorArena:
    """One process's view of the shared memory. Owns the descriptor ``file``. Not thread-safe."""

    def __init__(self, file: int, max_bytes: int = _MAX_BYTES) -> None:
        self.file = file
        self._max_bytes = max_bytes
        # The mapping is released by dropping the reference. Closing it would invalidate numpy views that are still in use.
        self._map: mmap.mmap | None = None
        self._size = 0

    @classmethod
    def create(cls, max_bytes: int = _MAX_BYTES) -> TensorArena:
        file = os.memfd_create("penstock-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, _FIRST_BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(file, max_bytes)

    def write(self, tensors: Mapping[str, Array]) -> list[TensorSlot]:
        """Replace the content with ``tensors``. Each tensor is copied once. Raises ResourceExhausted above the size limit."""
        return self.write_all([tensors])[0]

    def write_all(self, sets: Sequence[Mapping[str, Array]]) -> list[list[TensorSlot]]:
        """Like ``write``, for several sets of tensors at once."""
        written: list[list[TensorSlot]] = []
        wires: list[Array | bytes | memoryview] = []
        end = 0
        for tensors in sets:
            slots: list[TensorSlot] = []
            for name, array in tensors.items():
                datatype = DataType.from_numpy(array.dtype)
                wire = array if datatype.itemsize else to_wire(array)
                size = array.nbytes if datatype.itemsize else len(wire)
                slots.append(TensorSlot(name, datatype, array.shape, end, size))
                wires.append(wire)
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
            written.append(slots)
        mapped = self._mapped(end)
        for slot, wire in zip(chain.from_iterable(written), wires, strict=True):
            if not slot.byte_size:
                continue
            if isinstance(wire, np.ndarray):
                np.ndarray(slot.shape, slot.datatype.dtype, mapped, slot.offset)[...] = wire
            else:
                mapped[slot.offset : slot.offset + slot.byte_size] = wire
        return written

    def view(self, slots: Sequence[TensorSlot]) -> dict[str, Array]:
        """The tensors as read-only views, which are valid until the next write. BYTES tensors are decoded.

        Raises PenstockError for invalid slots, because a process that runs a model's code may send any slots.
        """
        mapped = self._mapped(max((slot.offset + slot.byte_size for slot in slots), default=0))
        tensors: dict[str, Array] = {}
        for slot in slots:
            itemsize = slot.datatype.itemsize
            size = math.prod(slot.shape) * itemsize if itemsize else slot.byte_size
            if slot.offset < 0 or slot.byte_size != size or min((*slot.shape, size)) < 0:
                raise PenstockError("the model's process sent the location of a tensor outside of its memory")
            if itemsize:
                array: Array = np.ndarray(slot.shape, slot.datatype.dtype, mapped, slot.offset)
                array.flags.writeable = False
            else:
                wire = memoryview(mapped)[slot.offset : slot.offset + slot.byte_size]
                array = from_wire(wire, slot.datatype, slot.shape)
            tensors[slot.name] = array
        return tensors

    def copy(self, slots: Sequence[TensorSlot]) -> dict[str, Array]:
        """Copies of the tensors."""
        return {name: array if array.dtype.kind == "O" else array.copy() for name, array in self.view(slots).items()}

    def close(self) -> None:
        """Free the mapping and the descriptor. Idempotent."""
        self._map = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _mapped(self, size: int) -> mmap.mmap:
        """Map at least ``size`` bytes."""
        if self._map is None or size > self._size:
            if size > self._max_bytes:
                raise ResourceExhausted(
                    f"tensors of {size} bytes exceed the limit of {self._max_bytes} bytes per call of a model's process"
                )
            self._map = None
            self._size = max(_FIRST_BYTES, 1 << (size - 1).bit_length() if size else 0)
            if os.fstat(self.file).st_size < self._size:
                os.ftruncate(self.file, self._size)
            self._map = mmap.mmap(self.file, self._size)
        return self._map
