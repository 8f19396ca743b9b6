"""Which models are served: look-up by name and version. Belongs to the event loop."""

from __future__ import annotations

import asyncio

from penstock.errors import NotFound
from penstock.online.repository.handle import Handle
from penstock.telemetry.statistics import ModelStatistics


class ServedModels:
    """The model versions that are ready."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Handle]] = {}
        self._greatest: dict[str, Handle] = {}

    def add(self, handle: Handle) -> Handle | None:
        """Serve ``handle`` from now on; what is returned has been served in its place, and may still have requests to answer."""
        versions = self._models.setdefault(handle.name, {})
        old = versions.get(handle.version)
        versions[handle.version] = handle
        self._greatest[handle.name] = versions[self.versions(handle.name)[-1]]
        return old

    def remove(self, name: str, version: str) -> Handle:
        """Serve it no more; what is returned may still have requests to answer. Raises NotFound."""
        handle = self.find(name, version)
        versions = self._models[name]
        del versions[handle.version]
        if versions:
            self._greatest[name] = versions[self.versions(name)[-1]]
        else:
            del self._models[name], self._greatest[name]
        return handle

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
            if namesakes := [one for one in self._models if one.endswith(f"/{name}")]:
                raise NotFound(f"Request for ambiguous model: '{name}' is in several repositories", _choice(namesakes))
            raise NotFound(f"Request for unknown model: {which} is not found")
        return handle

    def statistics(self) -> list[ModelStatistics]:
        """Of every model version."""
        return [handle.statistics for versions in self._models.values() for handle in versions.values()]

    async def unload_all(self) -> None:
        """Serve nothing more; return when all that was asked is answered and the memory given back."""
        handles = [handle for versions in self._models.values() for handle in versions.values()]
        self._models.clear()
        self._greatest.clear()
        await asyncio.gather(*(handle.unload() for handle in handles))


def _choice(names: list[str]) -> str:
    return f"ask for {' or '.join(names)}"
