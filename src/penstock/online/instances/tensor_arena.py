"""Tensors in memory that two processes share: one writes them all anew for every call, the other reads them.

The memory is a memfd that only grows, by doubling; it is sealed against shrinking, so that reading what the other side
announced cannot raise SIGBUS. Each side maps what it needs of it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from penstock.errors import ResourceExhausted
from penstock.tensor import Array, DataType, from_wire, to_wire

_FIRST_BYTES = 64 << 10
_MAX_BYTES = 8 << 30
# A cache line, and what vector instructions like.
_ALIGNMENT = 64


class TensorSlot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a tensor lies; BYTES are there in their wire form."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    offset: int
    byte_size: int


class TensorArena:
    """One side's view of the memory behind descriptor ``file``, which it takes over. Not thread-safe."""

    def __init__(self, file: int, max_bytes: int = _MAX_BYTES) -> None:
        self.file = file
        self._max_bytes = max_bytes
        # Never closed but dropped: numpy holds a reference to it, but would not keep it from being closed under a view.
        self._map: mmap.mmap | None = None
        self._size = 0

    @classmethod
    def create(cls, max_bytes: int = _MAX_BYTES) -> TensorArena:
        file = os.memfd_create("penstock-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, _FIRST_BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(file, max_bytes)

    def write(self, tensors: Mapping[str, Array]) -> list[TensorSlot]:
        """Replace what was there; each tensor is copied once. Raises ResourceExhausted beyond the most that may be held."""
        return self.write_all([tensors])[0]

    def write_all(self, sets: Sequence[Mapping[str, Array]]) -> list[list[TensorSlot]]:
        """As ``write`` for several sets of tensors at once."""
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
        self._fill([slot for slots in written for slot in slots], wires, end)
        return written

    def _fill(self, slots: Sequence[TensorSlot], wires: Sequence[Array | bytes | memoryview], end: int) -> None:
        mapped = self._mapped(end)
        for slot, wire in zip(slots, wires, strict=True):
            if not slot.byte_size:
                continue
            if isinstance(wire, np.ndarray):
                np.ndarray(slot.shape, slot.datatype.dtype, mapped, slot.offset)[...] = wire
            else:
                mapped[slot.offset : slot.offset + slot.byte_size] = wire

    def view(self, slots: Sequence[TensorSlot]) -> dict[str, Array]:
        """The tensors as read-only views, of use until they are written anew; BYTES are decoded."""
        mapped = self._mapped(max((slot.offset + slot.byte_size for slot in slots), default=0))
        tensors: dict[str, Array] = {}
        for slot in slots:
            if slot.datatype.itemsize:
                array: Array = np.ndarray(slot.shape, slot.datatype.dtype, mapped, slot.offset)
                array.flags.writeable = False
            else:
                wire = memoryview(mapped)[slot.offset : slot.offset + slot.byte_size]
                array = from_wire(wire, slot.datatype, slot.shape)
            tensors[slot.name] = array
        return tensors

    def copy(self, slots: Sequence[TensorSlot]) -> dict[str, Array]:
        """The tensors as the caller's own, each copied once."""
        return {name: array if array.dtype.kind == "O" else array.copy() for name, array in self.view(slots).items()}

    def close(self) -> None:
        """Give mapping and descriptor back. Idempotent."""
        self._map = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _mapped(self, size: int) -> mmap.mmap:
        """At least ``size`` bytes of it."""
        if self._map is None or size > self._size:
            if size > self._max_bytes:
                raise ResourceExhausted(
                    f"tensors of {size} bytes are more than the {self._max_bytes} that pass to a model's process at once"
                )
            self._map = None
            self._size = max(_FIRST_BYTES, 1 << (size - 1).bit_length() if size else 0)
            if os.fstat(self.file).st_size < self._size:
                os.ftruncate(self.file, self._size)
            self._map = mmap.mmap(self.file, self._size)
        return self._map
