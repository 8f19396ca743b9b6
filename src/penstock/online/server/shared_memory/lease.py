"""The shared memory that one request uses. Inputs are copied from regions, and outputs are copied into regions.

Large tensors are copied on another thread, so that a small message that refers to a large region does not delay other clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from penstock.errors import InvalidArgument, PenstockError
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.shared_memory.region import Region
from penstock.request import Done, InferResponse, Outcome
from penstock.tensor import Array, DataType, element_count, from_wire, to_wire

HERE_BYTES = 1 << 20
"""Maximum bytes of one request that the event loop copies in each direction. Copying them takes about 0.15 ms."""
_TEXT_HERE_BYTES = 16 << 10
"""The same maximum for BYTES elements, which take longer because they are also decoded."""
_LENGTH_BYTES = 4
_PLAIN = frozenset(DataType) - {DataType.BYTES, DataType.BOOL}
"""Datatypes whose elements may consist of any bytes."""


class Placement:
    """The place of one output: ``byte_size`` bytes within a region."""

    __slots__ = ("_byte_size", "_offset", "_region", "_written")

    def __init__(self, region: Region, offset: int, byte_size: int) -> None:
        self._region, self._offset, self._byte_size = region, offset, byte_size
        self._written: Array | None = None

    def write(self, array: Array) -> int:
        """Copy ``array`` to this place, and return the number of copied bytes. Does nothing if ``array`` has already been copied here.

        The lease must still be held. Raises InvalidArgument if the array does not fit, and ResourceExhausted.
        """
        if array is self._written:
            return 0
        data = to_wire(array)
        if len(data) > self._byte_size:
            raise InvalidArgument(
                f"shared memory size specified with the request ({self._byte_size} bytes) should be at least "
                f"{len(data)} bytes to hold the results, in region '{self._region.name}'"
            )
        self._region.write(self._offset, data)
        self._written = array
        return len(data)


class Lease:
    """The regions that one request uses. ``release`` is called once the response is encoded."""

    __slots__ = ("_budget", "_find", "_held", "_regions", "_unread", "placements")

    def __init__(self, find: Callable[[str], Region], budget: ByteBudget) -> None:
        """``find`` returns the region with a given name."""
        self.placements: dict[str, Placement] = {}
        """The place of each output."""
        self._find = find
        self._budget = budget
        self._held = 0  # bytes taken from the budget
        self._regions: list[Region] = []
        self._unread: list[Callable[[], None]] = []

    @property
    def is_unread(self) -> bool:
        """True if ``fill`` must be called before the inputs are used."""
        return bool(self._unread)

    def array(self, region: str, offset: int, byte_size: int, datatype: DataType, shape: Sequence[int]) -> Array:
        """An input, copied from the region. The elements of a large input are copied later, by ``fill``.

        Raises NotFound, InvalidArgument, and Unavailable if the budget has no room for the copy.
        """
        found = self._use(region)
        found.check(offset, byte_size)
        is_text = datatype is DataType.BYTES
        count = element_count(shape)
        if is_text and count * _LENGTH_BYTES > byte_size:
            raise InvalidArgument(f"{count} BYTES elements do not fit in {byte_size} bytes")
        if not is_text and count * datatype.itemsize != byte_size:
            raise InvalidArgument(
                f"shape {list(shape)} of {datatype.value} takes {count * datatype.itemsize} bytes, "
                f"but {byte_size} bytes were given"
            )
        is_large = self._held + byte_size > HERE_BYTES or (is_text and byte_size > _TEXT_HERE_BYTES)
        self._reserve(2 * byte_size if is_text else byte_size)  # decoding BYTES copies them into Python objects
        array: Array = np.empty(shape, datatype.dtype)
        read = partial(_read, found, offset, byte_size, datatype, array)
        if is_large:
            self._unread.append(read)
        else:
            read()
        return array

    def place(self, output: str, region: str, offset: int, byte_size: int) -> Placement:
        """Reserve the place of ``output``. Raises NotFound, InvalidArgument."""
        found = self._use(region)
        found.check(offset, byte_size)
        placement = self.placements[output] = Placement(found, offset, byte_size)
        return placement

    async def fill(self) -> None:
        """Read the large inputs on another thread. Raises InvalidArgument, ResourceExhausted."""
        unread, self._unread = self._unread, []
        await self._on_thread(lambda: [read() for read in unread])

    def storing(self, done: Done) -> Done:
        """Wrap ``done`` so that large outputs of the last response are written to their places before ``done`` is called."""
        return partial(self._store, done) if self.placements else done

    def release(self) -> None:
        """Release all regions. Idempotent."""
        regions, self._regions = self._regions, []
        for region in regions:
            region.release()
        self._budget.give(self._held)
        self._held = 0

    def _store(self, done: Done, outcome: Outcome) -> None:
        if isinstance(outcome, PenstockError) or not outcome.final or self._placed_bytes(outcome) <= HERE_BYTES:
            done(outcome)
            return
        placed = [(self.placements[name], array) for name, array in outcome.outputs.items() if name in self.placements]

        def stored(writing: asyncio.Task[None]) -> None:
            # The encoder repeats a failed write, so that the error reaches the client.
            if not writing.cancelled():
                writing.exception()
                done(outcome)

        task = asyncio.ensure_future(self._on_thread(lambda: [place.write(array) for place, array in placed]))
        task.add_done_callback(stored)

    def _placed_bytes(self, response: InferResponse) -> int:
        return sum(array.nbytes for name, array in response.outputs.items() if name in self.placements)

    async def _on_thread(self, work: Callable[[], object]) -> None:
        """Call ``work`` on another thread. Until it returns, the regions stay open, even if the lease is released."""
        regions = self._regions.copy()
        for region in regions:
            region.acquire()
        try:
            await asyncio.to_thread(work)
        finally:
            for region in regions:
                region.release()

    def _reserve(self, byte_size: int) -> None:
        if not self._budget.take(byte_size):
            raise self._budget.refusal()
        self._held += byte_size

    def _use(self, name: str) -> Region:
        region = self._find(name)
        if region not in self._regions:
            region.acquire()
            self._regions.append(region)
        return region


def _read(region: Region, offset: int, byte_size: int, datatype: DataType, array: Array) -> None:
    """Fill ``array`` from the region, then make the array read-only."""
    if datatype in _PLAIN:
        region.read(offset, array.reshape(-1).view(np.uint8).data)
    else:
        data = np.empty(byte_size, np.uint8)
        region.read(offset, data.data)
        array[...] = from_wire(data.data, datatype, array.shape)
    array.flags.writeable = False
