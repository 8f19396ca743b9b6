"""Which models are served: look-up by name and version. Belongs to the event loop."""

from __future__ import annotations

from penstock.errors import AlreadyExists, NotFound
from penstock.online.repository.handle import Handle
from penstock.telemetry.statistics import ModelStatistics


class ServedModels:
    """The model versions that are ready."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Handle]] = {}
        self._greatest: dict[str, Handle] = {}

    def add(self, handle: Handle) -> None:
        """Serve ``handle`` from now on. Raises AlreadyExists."""
        versions = self._models.setdefault(handle.name, {})
        if handle.version in versions:
            raise AlreadyExists(f"model '{handle.name}' version {handle.version} is already served")
        versions[handle.version] = handle
        self._greatest[handle.name] = versions[self.versions(handle.name)[-1]]

    def names(self) -> list[str]:
        return list(self._models)

    def versions(self, name: str) -> list[str]:
        """The versions served of ``name``, by rising number."""
        return sorted(self._models.get(name, ()), key=int)

    def find(self, name: str, version: str = "") -> Handle:
        """The handle of ``name``; without ``version`` the one with the greatest number. Raises NotFound."""
        handle = self._models.get(name, {}).get(version) if version else self._greatest.get(name)
        if handle is None:
            which = f"'{name}' version {version}" if name in self._models else f"'{name}'"
            raise NotFound(f"Request for unknown model: {which} is not found")
        return handle

    def statistics(self) -> list[ModelStatistics]:
        """Of every model version."""
        return [handle.statistics for versions in self._models.values() for handle in versions.values()]

    async def unload(self, name: str, version: str) -> None:
        """Serve it no more, at once; return when what was asked of it is answered and its memory given back. Raises NotFound."""
        handle = self.find(name, version)
        versions = self._models[name]
        del versions[handle.version]
        if versions:
            self._greatest[name] = versions[self.versions(name)[-1]]
        else:
            del self._models[name], self._greatest[name]
        await handle.unload()

    async def unload_all(self) -> None:
        for name in self.names():
            for version in self.versions(name):
                await self.unload(name, version)
