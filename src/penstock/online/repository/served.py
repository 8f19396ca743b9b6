"""The served models, by name and version. Used only on the event loop."""

from __future__ import annotations

import asyncio

from penstock.errors import NotFound, bounded, quoted
from penstock.online.repository.handle import Handle
from penstock.telemetry.statistics import ModelStatistics


class ServedModels:
    """The model versions that are ready."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Handle]] = {}
        self._greatest: dict[str, Handle] = {}

    def add(self, handle: Handle) -> Handle | None:
        """Serve ``handle``. Returns the handle that it replaces, if any. The replaced handle may still have requests to answer."""
        versions = self._models.setdefault(handle.name, {})
        old = versions.get(handle.version)
        versions[handle.version] = handle
        self._greatest[handle.name] = versions[self.versions(handle.name)[-1]]
        return old

    def remove(self, name: str, version: str) -> Handle:
        """Stop serving a version. Returns the version's handle, which may still have requests to answer. Raises NotFound."""
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
        """The served versions of ``name``, in ascending order."""
        return sorted(self._models.get(name, ()), key=int)

    def find(self, name: str, version: str = "") -> Handle:
        """The handle of model ``name``. If ``version`` is empty, this is the handle of the greatest version. Raises NotFound."""
        handle = self._models.get(name, {}).get(version) if version else self._greatest.get(name)
        if handle is None:
            which = f"{quoted(name)} version {version:.20}" if name in self._models else quoted(name)
            if namesakes := [one for one in self._models if one.endswith(f"/{name}")]:
                hint = f"use {' or '.join(namesakes)}"
                raise NotFound(f"Request for ambiguous model: {quoted(name)} is in several repositories", hint)
            hint = f"its versions are {bounded(', '.join(self.versions(name)))}" if name in self._models else ""
            raise NotFound(f"Request for unknown model: {which} is not found", hint)
        return handle

    def statistics(self) -> list[ModelStatistics]:
        """The statistics of every served version, and of the models of pipelines."""
        handles = (handle for versions in self._models.values() for handle in versions.values())
        return [statistics for handle in handles for statistics in handle.all_statistics]

    async def unload_all(self) -> None:
        """Stop serving all models. Returns when all requests are answered and all models are unloaded."""
        handles = [handle for versions in self._models.values() for handle in versions.values()]
        self._models.clear()
        self._greatest.clear()
        await asyncio.gather(*(handle.unload() for handle in handles))
