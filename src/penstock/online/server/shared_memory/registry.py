"""Client shared memory: the registered regions.

Each request takes one ``Lease`` for all its regions. New requests cannot use an unregistered region. Such a region closes when its
last lease is released.
"""

from __future__ import annotations

from penstock.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, Unsupported, quoted
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.shared_memory.lease import Lease
from penstock.online.server.shared_memory.region import Region

NO_CUDA = "CUDA shared memory is not supported"

_MAX_REGIONS = 512
"""Maximum number of regions. Each region takes a file descriptor, and connections need descriptors too."""
_MAX_NAME = 1024


class SharedMemory:
    """The registered regions. Used only on the event loop."""

    def __init__(self, enabled: bool, budget: ByteBudget | None = None) -> None:
        """``budget`` limits the bytes that requests in progress have copied from regions. None sets no limit."""
        self.enabled = enabled
        self.budget = budget or ByteBudget(0)
        self._regions: dict[str, Region] = {}
        self._leaving: list[Region] = []
        """Unregistered regions that may still be in use."""

    @property
    def has_regions(self) -> bool:
        """True if any region is registered."""
        return bool(self._regions)

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open ``byte_size`` bytes at ``offset`` of the POSIX shared memory object ``key``.

        Raises Unsupported, AlreadyExists, InvalidArgument, NotFound, ResourceExhausted.
        """
        self._check_new(name)
        self._regions[name] = Region(name, key, offset, byte_size)

    def status(self, name: str = "") -> list[dict[str, str | int]]:
        """Name, key, offset and byte_size of region ``name``, or of all regions if it is empty. Raises NotFound, Unsupported."""
        self._check_enabled()
        if not name:
            return [region.describe() for region in self._regions.values()]
        if name not in self._regions:
            raise NotFound(f"Unable to find system shared memory region: {quoted(name)}")
        return [self._regions[name].describe()]

    def forget(self, name: str) -> None:
        """Unregister region ``name``, or all regions if it is empty. Requests in progress keep their regions open.

        An unknown name is ignored, as in Triton. Raises Unsupported.
        """
        self._check_enabled()
        forgotten = [region for region in self._regions.values() if name in ("", region.name)]
        for region in forgotten:
            del self._regions[region.name]
            region.retire()
        self._leaving = [region for region in [*self._leaving, *forgotten] if not region.closed.is_set()]

    async def closed(self, name: str) -> None:
        """Wait until the unregistered regions called ``name`` are closed. If ``name`` is empty, wait for all unregistered regions."""
        for region in [region for region in self._leaving if name in ("", region.name)]:
            await region.closed.wait()

    def lease(self) -> Lease:
        """An empty lease for one request."""
        return Lease(self.find, self.budget)

    def find(self, name: str) -> Region:
        """The region ``name``. Raises NotFound, Unsupported."""
        region = self._regions.get(name)
        if region is None:
            self._check_enabled()
            raise NotFound(f"Unable to find shared memory region: {quoted(name)}")
        return region

    def close(self) -> None:
        """Unregister all regions when the server ends. A region closes when its last lease is released."""
        regions, self._regions = self._regions, {}
        for region in regions.values():
            region.retire()

    def _check_new(self, name: str) -> None:
        self._check_enabled()
        if name in self._regions:
            raise AlreadyExists(f"shared memory region {quoted(name)} already in manager", "unregister it first")
        if not 0 < len(name) <= _MAX_NAME:
            raise InvalidArgument(
                f"the name of a shared memory region must have 1 to {_MAX_NAME} characters, got {len(name)}"
            )
        if len(self._regions) >= _MAX_REGIONS:
            raise ResourceExhausted(
                f"at most {_MAX_REGIONS} shared memory regions can be registered", "unregister other regions first"
            )

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise Unsupported("client shared memory is disabled", "set 'allow_client_shm' to 'true'")
