"""The control plane: what is asked of, and told to, the server itself, whatever transport it came by.

All of it is asynchronous: with several server processes an answer takes in what the others know, and what one of them is
told the others are told too.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import msgspec

from penstock.errors import InvalidArgument, NotFound, PenstockError, Unavailable
from penstock.online.daemon import on_daemon_thread
from penstock.online.repository.layout import check_name
from penstock.online.repository.manager import Manager
from penstock.online.repository.override import Override, read_parameters, store
from penstock.online.repository.served import ServedModels
from penstock.online.repository.state import Row, State, Version
from penstock.online.server.metrics_page import MetricsPage, Report
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.telemetry.logging import LogSettings
from penstock.telemetry.statistics import ModelStatistics, merge
from penstock.telemetry.tracing import Tracer

Settings = Mapping[str, Any]

_TOLD = frozenset(
    {
        "register_shared_memory",
        "register_cuda_shared_memory",
        "trace_settings",
        "log_settings",
        "change_model",
        "own_index",
        "own_models",
    }
)
"""What each process does that one of them was told."""


class Siblings(Protocol):
    """The other processes of this server."""

    async def ask(self, what: str, *arguments: Any, patient: bool = False) -> list[Any]:
        """What each of their control planes answers to ``what``. Raises what one of them raises.

        Those that take too long are left out, unless ``patient``.
        """
        return []

    def keep(self, what: Any) -> None:
        """Leave something for whoever takes this process's place, and speaks for it until then."""
        return

    def inherited(self) -> Any:
        """What this process's predecessor has kept; None if there was none."""
        return None

    def kept_by_absent(self) -> list[Any]:
        """What those have kept that were left out when last something was asked."""
        return []

    def exclusive(self, what: str = "", *, patient: bool = False) -> AbstractAsyncContextManager[None]:
        """Entered by one process at a time: for changes, which so reach all of them in one order. Raises Unavailable if that takes too
        long, unless ``patient``."""
        return nullcontext()


class Alone(Siblings):
    """No siblings."""


class ControlPlane:
    """Belongs to the event loop."""

    def __init__(
        self,
        repository: ServedModels,
        shared_memory: SharedMemory,
        tracer: Tracer,
        log: LogSettings,
        siblings: Siblings,
        metrics: MetricsPage,
        manager: Manager | None = None,
    ) -> None:
        """``manager`` is None if the models stay those that are served."""
        self._repository = repository
        self._shared_memory = shared_memory
        self._tracer = tracer
        self._log = log
        self._siblings = siblings
        self._metrics = metrics
        self._manager = manager
        self._uneven: set[str] = set()
        """Models of which the siblings may serve something else, as they could not load what is served here."""

    async def answer(self, what: str, arguments: list[Any]) -> Any:
        """Do what a sibling process asks for: one of the methods below, for this process alone. Raises PenstockError."""
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
        if what not in _TOLD:
            raise InvalidArgument(f"no process is asked for '{what[:40]}'")
        settings = (self._repository, self._shared_memory, self._tracer, self._log)
        local = ControlPlane(*settings, Alone(), self._metrics, self._manager)
        return await getattr(local, what)(*arguments)

    async def catch_up(self) -> None:
        """Take over what the siblings have been told before this process was there. Raises Unavailable."""
        async with self._siblings.exclusive():
            for state in await self._siblings.ask("state"):
                for region in state["regions"]:
                    with suppress(PenstockError):  # its client has removed it since
                        self._shared_memory.register(**region)
                for model, update in state["trace"].items():
                    self._tracer.settings(model, update)
                self._log.update(state["log"])
                return

    # The repository

    async def wanted_models(self) -> dict[str, Override | None] | None:
        """The models that the siblings serve because they were asked to; None if there are no siblings."""
        for models in await self._siblings.ask("own_models"):
            return msgspec.convert(models, dict[str, Override | None])
        return None

    async def own_models(self) -> dict[str, Override | None]:
        """The models that this process serves because it was asked to, and what was put in their files' place."""
        return dict(self._manager.loaded_by_name()) if self._manager is not None else {}

    async def repository_index(self, ready: bool = False) -> list[Row]:
        """A row for every model version, with what is wrong with it in whatever process; only the ready ones if ``ready``."""
        others = await self._siblings.ask("own_index")
        wrong = {_which(row): row for rows in others for row in rows if row.get("reason")}
        rows = [row if row.get("reason") else wrong.get(_which(row), row) for row in await self.own_index()]
        return [row for row in rows if not ready or row.get("state") == State.READY.value]

    async def own_index(self) -> list[Row]:
        """As ``repository_index``, of this process."""
        if self._manager is not None:
            return await self._manager.index()
        return [
            Version(State.READY, handle=self._repository.find(name, version)).row(name, version)
            for name in self._repository.names()
            for version in self._repository.versions(name)
        ]

    async def load(self, name: str, parameters: Settings) -> None:
        """Load a model in all processes, or have what is loaded reloaded if it has changed; returns when it is ready.

        Raises Unavailable unless clients may, InvalidArgument, and what the manager's ``load`` raises; then it is as before.
        """
        self._refuse_control(name)
        config, files = read_parameters(name, parameters)
        folder = str(await on_daemon_thread("store-files", partial(store, files))) if files else ""
        await self.change_model("load", name, None if config is None else Override(config, folder))

    async def unload(self, name: str, parameters: Settings) -> None:
        """Unload a model in all processes; what it was asked is still answered.

        Raises Unavailable unless clients may, and InvalidArgument.
        """
        self._refuse_control(name)
        with_parts = parameters.get("unload_dependents", False)
        if parameters.keys() - {"unload_dependents"} or not isinstance(with_parts, bool):
            raise InvalidArgument(f"bad parameters to unload model '{name}'", "'unload_dependents', true or false")
        await self.change_model("unload", name, with_parts)

    async def poll(self) -> None:
        """Have all processes serve what the repositories hold now. Raises NotFound if one is not there."""
        assert self._manager is not None
        changes = dict(await self._manager.changes())
        changes |= {name: True for name in self._uneven if changes.get(name, True)}
        work = (self.change_model("update" if is_there else "unload", name) for name, is_there in changes.items())
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            if outcome is not None and not isinstance(outcome, PenstockError):  # those are in the log and in the index
                raise outcome

    def _refuse_control(self, name: str) -> None:
        if self._manager is None or not self._manager.is_explicit:
            raise Unavailable("explicit model load / unload is not allowed", "serve with 'model_control_mode' explicit")
        check_name(name)

    async def change_model(self, what: str, name: str, argument: Any = None) -> None:
        """Change a model here and then in the siblings; if one of them cannot load it, nobody keeps it who had none.

        ``what`` is ``load``, with an override or None; ``update``, as its files have changed; or ``unload``, with whether its parts
        go too. Raises as the manager's methods.
        """
        async with self._siblings.exclusive("models", patient=True):
            was_served = bool(self._repository.versions(name))
            await self._change_here(what, name, argument)
            if what != "unload":  # also what they could not load when this process did
                argument = (await self.own_models()).get(name)
            self._uneven.discard(name)
            try:
                await self._siblings.ask("change_model", what, name, argument, patient=True)
            except PenstockError:
                if was_served:
                    self._uneven.add(name)
                else:
                    await self._change_here("unload", name, None)
                    await self._siblings.ask("change_model", "unload", name, patient=True)
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
        """For Prometheus, over all processes."""
        self._own_statistics()
        others = await self._siblings.ask("report")
        dead = self._statistics_of_absent()
        return await self._metrics.render([msgspec.convert(other, Report) for other in others], dead)

    async def all_statistics(self) -> list[ModelStatistics]:
        """Of every model version, over all processes."""
        mine = self._own_statistics()
        others = await self._siblings.ask("statistics")
        theirs = [msgspec.convert(other, list[ModelStatistics]) for other in others] + self._statistics_of_absent()
        return merge([mine, *theirs]) if theirs else mine

    async def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Of all models, one, or one version, in the protocol's form. Raises InvalidArgument for a model that is not served."""
        if name:
            try:
                self._repository.find(name, version)
            except NotFound:
                which = f"{name}' version {version}" if version else f"{name}'"
                raise InvalidArgument(f"requested model '{which} is not available") from None
        return [
            one.to_dict()
            for one in await self.all_statistics()
            if name in ("", one.name) and version in ("", one.version)
        ]

    def inherit(self) -> None:
        """Go on counting where a process whose place this one takes has ended; before siblings can ask."""
        if (kept := self._siblings.inherited()) is not None:
            self._metrics.inherited = msgspec.convert(kept, list[ModelStatistics])

    def _own_statistics(self) -> list[ModelStatistics]:
        """Of this process. What anybody has seen of them stays known when it dies, so that no counter ever goes back."""
        own = self._metrics.models()
        if not isinstance(self._siblings, Alone):
            self._siblings.keep([_counters(one) for one in own])
        return own

    def _statistics_of_absent(self) -> list[list[ModelStatistics]]:
        return [msgspec.convert(kept, list[ModelStatistics]) for kept in self._siblings.kept_by_absent()]

    # Settings

    async def trace_settings(self, model: str = "", update: Settings | None = None) -> dict[str, Any]:
        """The settings that hold for ``model``, empty for all, after ``update``. Raises NotFound, InvalidArgument."""
        if model:
            self._repository.find(model)
        if update:
            async with self._siblings.exclusive():
                self._tracer.settings(model, update)
                await self._siblings.ask("trace_settings", model, dict(update))
        return self._tracer.settings(model)

    async def log_settings(self, update: Settings | None = None) -> dict[str, Any]:
        """The settings after ``update``. Raises InvalidArgument."""
        if update:
            async with self._siblings.exclusive():
                self._log.update(update)
                await self._siblings.ask("log_settings", dict(update))
        return self._log.get()

    # Shared memory

    async def shared_memory_status(self, name: str = "") -> list[dict[str, Any]]:
        """Every region, or the one called ``name``. Raises NotFound."""
        return self._shared_memory.status(name)

    async def register_shared_memory(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Make a region known to all processes, or to none.

        Raises AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, Unsupported, and Unavailable if the others are busy.
        """
        async with self._siblings.exclusive():
            self._shared_memory.register(name, key, offset, byte_size)
            await self._tell_of(name, "register_shared_memory", key, offset, byte_size, is_cuda=False)

    async def unregister_shared_memory(self, name: str = "") -> None:
        """Forget a region, or all; returns when no request uses it any more. Raises Unsupported, Unavailable."""
        await self._unregister(name, is_cuda=False)

    async def cuda_shared_memory_status(self, name: str = "") -> list[dict[str, Any]]:
        """As ``shared_memory_status``, of regions on GPUs."""
        return self._shared_memory.cuda_status(name)

    async def register_cuda_shared_memory(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """As ``register_shared_memory``, for a region on a GPU."""
        async with self._siblings.exclusive():
            self._shared_memory.register_cuda(name, raw_handle, device_id, byte_size)
            await self._tell_of(name, "register_cuda_shared_memory", raw_handle, device_id, byte_size, is_cuda=True)

    async def unregister_cuda_shared_memory(self, name: str = "") -> None:
        """As ``unregister_shared_memory``, for regions on GPUs."""
        await self._unregister(name, is_cuda=True)

    async def _tell_of(self, name: str, what: str, *arguments: Any, is_cuda: bool) -> None:
        """Have the siblings register a region that is registered here; if one cannot, nobody has it."""
        try:
            await self._siblings.ask(what, name, *arguments)
        except PenstockError:
            await self._forget(name, is_cuda)
            raise

    async def _forget(self, name: str, is_cuda: bool) -> None:
        self._shared_memory.forget(name, is_cuda)
        await self._siblings.ask("forget_regions", name, is_cuda)

    async def _unregister(self, name: str, is_cuda: bool) -> None:
        async with self._siblings.exclusive():
            await self._forget(name, is_cuda)
        # However long that takes: until then the client must not use the memory for anything else.
        await self._siblings.ask("regions_closed", name, is_cuda, patient=True)
        await self._shared_memory.closed(name, is_cuda)


def _which(row: Row) -> tuple[str, str]:
    return row["name"], row.get("version", "")


def _counters(one: ModelStatistics) -> ModelStatistics:
    """What of ``one`` outlives its process."""
    return dataclasses.replace(one, pending=0, recent=None)
