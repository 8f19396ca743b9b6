"""Client shared memory: which regions are registered, who uses them, and tensors in and out of them.

A request takes one ``Lease`` for all regions it names. A region that is unregistered is at once unknown to new requests and
is closed when its last lease has been released.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, Unsupported
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.shared_memory.region import Region
from penstock.tensor import Array, DataType, from_wire, to_wire

NO_CUDA = "CUDA shared memory is not supported"

_MAX_REGIONS = 512
"""A region takes two file descriptors, which connections need too."""
_MAX_NAME = 1024


class SharedMemory:
    """The registry. Belongs to the event loop."""

    def __init__(self, enabled: bool, budget: ByteBudget | None = None) -> None:
        """``budget`` bounds the bytes that requests in progress have copied out of regions; None: no limit."""
        self.enabled = enabled
        self.budget = budget or ByteBudget(0)
        self._regions: dict[str, Region] = {}
        self._leaving: list[Region] = []
        """Regions that were forgotten and may still be in use."""

    @property
    def has_regions(self) -> bool:
        """Whether any is registered."""
        return bool(self._regions)

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map ``byte_size`` bytes at ``offset`` of the POSIX shared memory object ``key``.

        Raises Unsupported, AlreadyExists, InvalidArgument, NotFound, ResourceExhausted.
        """
        self._check_new(name)
        self._regions[name] = Region(name, key, offset, byte_size)

    def status(self, name: str = "") -> list[dict[str, str | int]]:
        """Name, key, offset and byte_size of region ``name``, or of all. Raises NotFound, Unsupported."""
        self._check_enabled()
        if not name:
            return [region.describe() for region in self._regions.values()]
        if name not in self._regions:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [self._regions[name].describe()]

    def forget(self, name: str) -> None:
        """Remove region ``name``, or all if it is empty, so that new requests do not find it.

        An unknown name is ignored, as in Triton. Raises Unsupported.
        """
        self._check_enabled()
        forgotten = [region for region in self._regions.values() if name in ("", region.name)]
        for region in forgotten:
            del self._regions[region.name]
            region.retire()
        self._leaving = [region for region in [*self._leaving, *forgotten] if not region.closed.is_set()]

    async def closed(self, name: str) -> None:
        """Wait until every region that was forgotten under ``name``, or any name if it is empty, has been closed."""
        for region in [region for region in self._leaving if name in ("", region.name)]:
            await region.closed.wait()

    async def unregister(self, name: str = "") -> None:
        """Forget region ``name``, or all, and return when they are closed. Raises Unsupported."""
        self.forget(name)
        await self.closed(name)

    def lease(self) -> Lease:
        """For one request; costs nothing until a region is used."""
        return Lease(self)

    def find(self, name: str) -> Region:
        """The region that a tensor names. Raises NotFound, Unsupported."""
        region = self._regions.get(name)
        if region is None:
            self._check_enabled()
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        return region

    def close(self) -> None:
        """Forget all regions, when the server ends; those in use are closed by their last users."""
        regions, self._regions = self._regions, {}
        for region in regions.values():
            region.retire()

    def _check_new(self, name: str) -> None:
        self._check_enabled()
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager", "unregister it first")
        if not 0 < len(name) <= _MAX_NAME:
            raise InvalidArgument(f"a shared memory region's name must have 1 to {_MAX_NAME} characters")
        if len(self._regions) >= _MAX_REGIONS:
            raise ResourceExhausted(
                f"no more than {_MAX_REGIONS} shared memory regions can be registered", "unregister some"
            )

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise Unsupported("client shared memory is switched off", "set 'allow_client_shm' to 'true'")


class Placement:
    """Where one output goes: ``byte_size`` bytes of a region, checked to lie within."""

    __slots__ = ("_byte_size", "_offset", "_region")

    def __init__(self, region: Region, offset: int, byte_size: int) -> None:
        self._region, self._offset, self._byte_size = region, offset, byte_size

    def write(self, array: Array) -> int:
        """Copy ``array`` there, once; the number of bytes. Raises InvalidArgument if it does not fit, ResourceExhausted.

        The lease must not have been released.
        """
        data = to_wire(array)
        if len(data) > self._byte_size:
            raise InvalidArgument(
                f"shared memory size specified with the request ({self._byte_size} bytes) should be at least "
                f"{len(data)} bytes to hold the results, in region '{self._region.name}'"
            )
        self._region.write(self._offset, data)
        return len(data)


class Lease:
    """The regions that one request uses; ``release`` when its answer has been written."""

    __slots__ = ("_held", "_memory", "_regions")

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._held = 0  # bytes of the budget
        self._regions: list[Region] = []

    def array(self, region: str, offset: int, byte_size: int, datatype: DataType, shape: Sequence[int]) -> Array:
        """The tensor there, read-only; a view of the region where that is safe, see ``region.py``; BYTES are decoded.

        Raises NotFound, InvalidArgument, and Unavailable if a copy is needed that the budget has no room for.
        """
        found = self._use(region)
        found.check(offset, byte_size)
        if datatype is DataType.BYTES:
            self._reserve(byte_size)  # for the elements
        return from_wire(found.read(offset, byte_size, self._reserve), datatype, shape)

    def place(self, region: str, offset: int, byte_size: int) -> Placement:
        """Where an output goes. Raises NotFound, InvalidArgument."""
        found = self._use(region)
        found.check(offset, byte_size)
        return Placement(found, offset, byte_size)

    def release(self) -> None:
        """Release all regions. Idempotent."""
        regions, self._regions = self._regions, []
        for region in regions:
            region.release()
        self._memory.budget.give(self._held)
        self._held = 0

    def _reserve(self, byte_size: int) -> None:
        budget = self._memory.budget
        if not budget.take(byte_size):
            raise budget.refusal()
        self._held += byte_size

    def _use(self, name: str) -> Region:
        region = self._memory.find(name)
        if region not in self._regions:
            region.acquire()
            self._regions.append(region)
        return region
