"""The control plane: queries about the server and changes to it, independent of the transport.

All operations are asynchronous. With several server processes, the answer to a query combines the answers of all processes, and a
change is forwarded to all of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from penstock.errors import InvalidArgument, NotFound, PenstockError, PermissionDenied, Unavailable, quoted
from penstock.online.daemon import on_daemon_thread
from penstock.online.repository.layout import check_name
from penstock.online.repository.manager import Manager
from penstock.online.repository.override import Override, is_file, read_parameters, store
from penstock.online.repository.served import ServedModels
from penstock.online.repository.state import Row, VersionPhase, VersionState
from penstock.online.server.metrics_page import MetricsPage, Report
from penstock.online.server.processes.group import ProcessGroup
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.telemetry.logging import LogSettings
from penstock.telemetry.statistics import ModelStatistics, merge
from penstock.telemetry.tracing import Tracer

Parameters = Mapping[str, Any]

_FORWARDED = frozenset(
    {
        "register_shared_memory",
        "trace_settings",
        "log_settings",
        "change_model",
        "own_index",
        "own_models",
    }
)
"""Operations that are forwarded to every process of the server."""


class ControlPlane:
    """Answers queries and applies changes, for all processes of the server. Used only on the event loop."""

    def __init__(
        self,
        repository: ServedModels,
        shared_memory: SharedMemory,
        tracer: Tracer,
        log: LogSettings,
        group: ProcessGroup,
        metrics: MetricsPage,
        manager: Manager | None = None,
    ) -> None:
        """``manager`` is None if the served models never change."""
        self._repository = repository
        self._shared_memory = shared_memory
        self._tracer = tracer
        self._log = log
        self._group = group
        self._metrics = metrics
        self._manager = manager
        self._uneven: set[str] = set()
        """Models that other processes may serve in an older state, because they failed to load the state served here."""

    async def answer(self, what: str, arguments: list[Any]) -> Any:
        """Run the operation ``what`` that another process requests. It affects only this process. Raises PenstockError."""
        if what == "statistics":
            return self._own_statistics()
        if what == "report":
            self._own_statistics()
            return self._metrics.report()
        if what == "state":
            regions = self._shared_memory.status() if self._shared_memory.enabled else []
            return {"regions": regions, "trace": self._tracer.changes(), "log": self._log.get()}
        if what == "forget_regions":
            return self._shared_memory.forget(*arguments)
        if what == "regions_closed":
            return await self._shared_memory.closed(*arguments)
        if what not in _FORWARDED:
            raise InvalidArgument(f"unknown operation {quoted(what)} from another process")
        settings = (self._repository, self._shared_memory, self._tracer, self._log)
        local = ControlPlane(*settings, ProcessGroup(), self._metrics, self._manager)
        return await getattr(local, what)(*arguments)

    async def catch_up(self) -> None:
        """Apply the settings that the other processes received before this process started. Raises Unavailable."""
        async with self._group.exclusive():
            for state in await self._group.ask("state"):
                for region in state["regions"]:
                    with suppress(PenstockError):  # the client has since removed the memory
                        self._shared_memory.register(**region)
                for model, update in state["trace"].items():
                    self._tracer.settings(model, update)
                self._log.update(state["log"])
                return

    # The repository

    async def wanted_models(self) -> dict[str, Override | None] | None:
        """The models that the other processes were asked to serve; None if there are no other processes."""
        for models in await self._group.ask("own_models"):
            return msgspec.convert(models, dict[str, Override | None])
        return None

    async def own_models(self) -> dict[str, Override | None]:
        """The models that this process was asked to serve, each with its override, if any."""
        return dict(self._manager.loaded_by_name()) if self._manager is not None else {}

    async def repository_index(self, ready: bool = False) -> list[Row]:
        """A row for every model version. It shows an error if any process has one. ``ready`` selects only ready versions."""
        others = await self._group.ask("own_index")
        wrong = {(row["name"], row.get("version")): row for rows in others for row in rows if row.get("reason")}
        own = await self.own_index()
        rows = [row if row.get("reason") else wrong.get((row["name"], row.get("version")), row) for row in own]
        return [row for row in rows if not ready or row.get("state") == VersionPhase.READY.value]

    async def own_index(self) -> list[Row]:
        """The rows of ``repository_index``, for this process alone."""
        if self._manager is not None:
            return await self._manager.index()
        return [
            VersionState(VersionPhase.READY, handle=self._repository.find(name, version)).row(name, version)
            for name in self._repository.names()
            for version in self._repository.versions(name)
        ]

    async def load(self, name: str, parameters: Parameters) -> None:
        """Load a model in all processes, or reload it if it has changed. Returns when the model is ready.

        Raises the errors of ``check_load`` and ``Manager.load``, and InvalidArgument. After an error, the model is served as before.
        """
        self.check_load(name, parameters)
        config, files = read_parameters(name, parameters)
        folder = str(await on_daemon_thread("store-files", partial(store, files))) if files else ""
        await self.change_model("load", name, None if config is None else Override(config, folder))

    async def unload(self, name: str, parameters: Parameters) -> None:
        """Unload a model in all processes. Requests in flight are still answered.

        Raises InvalidArgument, and Unavailable unless the server allows explicit control.
        """
        self._refuse_control(name)
        with_parts = parameters.get("unload_dependents", False)
        if parameters.keys() - {"unload_dependents"} or not isinstance(with_parts, bool):
            raise InvalidArgument(
                f"bad parameters to unload model {quoted(name)}", "use only 'unload_dependents', true or false"
            )
        await self.change_model("unload", name, with_parts)

    async def poll(self) -> None:
        """Apply the current content of the repositories in all processes. Raises NotFound if a repository is missing."""
        assert self._manager is not None
        changes = dict(await self._manager.changes())
        changes |= {name: True for name in self._uneven if changes.get(name, True)}
        work = (self.change_model("update" if is_there else "unload", name) for name, is_there in changes.items())
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            if outcome is not None and not isinstance(outcome, PenstockError):
                raise outcome  # a PenstockError is already in the log and the index

    def check_load(self, name: str, parameters: Iterable[str]) -> None:
        """Check that a client may load a model with these parameter names. Call this before the values are decoded.

        Raises Unavailable unless explicit control is allowed, InvalidArgument, and PermissionDenied if the client may not send files.
        """
        self._refuse_control(name)
        if any(map(is_file, parameters)) and not (self._manager and self._manager.takes_files):
            raise PermissionDenied(
                f"model {quoted(name)} may not be loaded from files that a client sends",
                "put the files into the repository, use the key of an admin, or start the server with --allow-model-upload",
            )

    def _refuse_control(self, name: str) -> None:
        if self._manager is None or not self._manager.is_explicit:
            raise Unavailable("explicit model load / unload is not allowed", "set 'model_control_mode' to 'explicit'")
        check_name(name)

    async def change_model(self, what: str, name: str, argument: Any = None) -> None:
        """Change a model in this process, then in the other processes. If a process cannot load a new model, all processes unload
        it again.

        ``what`` is ``load``, ``update`` (after a change of files) or ``unload``. For ``load``, ``argument`` is an override or None.
        For ``unload``, ``argument`` is True to also unload an ensemble's models. Raises the same errors as the manager's methods.
        """
        async with self._group.exclusive("models", patient=True):
            was_served = bool(self._repository.versions(name))
            await self._change_here(what, name, argument)
            if what != "unload":  # also update versions that the other processes failed to load earlier
                argument = (await self.own_models()).get(name)
            self._uneven.discard(name)
            try:
                await self._group.ask("change_model", what, name, argument, patient=True)
            except PenstockError:
                if was_served:
                    self._uneven.add(name)
                else:
                    await self._change_here("unload", name, None)
                    await self._group.ask("change_model", "unload", name, patient=True)
                raise

    async def _change_here(self, what: str, name: str, argument: Any) -> None:
        assert self._manager is not None
        if what == "unload":
            await self._manager.unload(name, with_parts=bool(argument))
        else:
            override = msgspec.convert(argument, Override | None, from_attributes=True)
            await self._manager.load(name, override, is_due=what == "update")

    # Statistics

    async def metrics_page(self) -> bytes:
        """The metrics page for Prometheus, over all processes."""
        self._own_statistics()
        others = await self._group.ask("report")
        dead = self._statistics_of_absent()
        return await self._metrics.render([msgspec.convert(other, Report) for other in others], dead)

    async def all_statistics(self) -> list[ModelStatistics]:
        """The statistics of every model version, over all processes."""
        mine = self._own_statistics()
        others = await self._group.ask("statistics")
        theirs = [msgspec.convert(other, list[ModelStatistics]) for other in others] + self._statistics_of_absent()
        return merge([mine, *theirs]) if theirs else mine

    async def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """The statistics of all models, of one model or of one version, in the protocol's form. Raises InvalidArgument for a model
        that is not served.
        """
        if name:
            try:
                self._repository.find(name, version)
            except NotFound:
                which = f"{quoted(name)} version {version[:20]}" if version else quoted(name)
                raise InvalidArgument(f"requested model {which} is not available") from None
        return [
            one.to_dict()
            for one in await self.all_statistics()
            if name in ("", one.name) and version in ("", one.version)
        ]

    def served_statistics(self) -> list[ModelStatistics]:
        """The statistics of every model version that this process serves. Do not change them."""
        return self._repository.statistics()

    def inherit(self) -> None:
        """Continue the counters of the process that this process replaces. Call this before other processes can query this process."""
        if (kept := self._group.inherited()) is not None:
            self._metrics.inherit(msgspec.convert(kept, list[ModelStatistics]))

    def _own_statistics(self) -> list[ModelStatistics]:
        """The statistics of this process. Stored before they are reported, so that no counter decreases if the process dies."""
        own = self._metrics.models()
        self._group.keep([dataclasses.replace(one, pending=0, recent=None) for one in own])
        return own

    def _statistics_of_absent(self) -> list[list[ModelStatistics]]:
        return [msgspec.convert(kept, list[ModelStatistics]) for kept in self._group.kept_by_absent()]

    # Parameters

    async def trace_settings(self, model: str = "", update: Parameters | None = None) -> dict[str, Any]:
        """Apply ``update`` and return the trace settings of ``model``. If ``model`` is empty, these are the global settings. Raises
        NotFound, InvalidArgument.
        """
        if model:
            self._repository.find(model)
        if update:
            async with self._group.exclusive():
                self._tracer.settings(model, update)
                await self._group.ask("trace_settings", model, dict(update))
        return self._tracer.settings(model)

    async def log_settings(self, update: Parameters | None = None) -> dict[str, Any]:
        """Apply ``update`` and return the log settings. Raises InvalidArgument."""
        if update:
            async with self._group.exclusive():
                self._log.update(update)
                await self._group.ask("log_settings", dict(update))
        return self._log.get()

    # Shared memory

    async def shared_memory_status(self, name: str = "") -> list[dict[str, Any]]:
        """The status of region ``name``, or of all regions if it is empty. Raises NotFound."""
        return self._shared_memory.status(name)

    async def register_shared_memory(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a region in all processes, or in none.

        Raises AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, Unsupported, and Unavailable if other processes are busy.
        """
        async with self._group.exclusive():
            self._shared_memory.register(name, key, offset, byte_size)
            try:
                await self._group.ask("register_shared_memory", name, key, offset, byte_size)
            except PenstockError:
                await self._forget(name)
                raise

    async def unregister_shared_memory(self, name: str = "") -> None:
        """Unregister a region, or all regions. Returns once no request uses them. Raises Unsupported, Unavailable."""
        async with self._group.exclusive():
            await self._forget(name)
        # There is no time limit, because the client must not reuse the memory before this returns.
        await self._group.ask("regions_closed", name, patient=True)
        await self._shared_memory.closed(name)

    async def _forget(self, name: str) -> None:
        self._shared_memory.forget(name)
        await self._group.ask("forget_regions", name)
