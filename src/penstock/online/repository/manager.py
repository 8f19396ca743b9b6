"""Loads, reloads and unloads the models of a server while it runs.

Operations on one model run one after another, in the order of the requests. Operations on different models run concurrently. A
reload loads the new version before it replaces the old version. The old version then finishes its accepted requests. If the new
version fails to load, the old version stays. Blocking work runs on daemon threads, and only a few models load at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock.errors import InvalidArgument, InvalidConfig, NotFound, PenstockError, ResourceExhausted, Unavailable
from penstock.online.daemon import on_daemon_thread
from penstock.online.repository.handle import Handle
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.assembly import Assembler
from penstock.online.repository.loading.loader import (
    FilesChanged,
    LoadedVersion,
    Preloaded,
    load_more,
    warm,
)
from penstock.online.repository.loading.pipeline import LoadedPipeline, load_any
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.override import Override, discard, hold
from penstock.online.repository.policy import choose, plan
from penstock.online.repository.resolved_version import LoadOptions
from penstock.online.repository.retirement import Retirement
from penstock.online.repository.seats import Seats
from penstock.online.repository.served import ServedModels
from penstock.online.repository.state import ManagedModel, Row, VersionState, rows

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Number of attempts to load a model whose files change meanwhile."""
_Result = TypeVar("_Result")
Loading = asyncio.Task[list[Any]]
"""The task of a running load. The result is a list of the ensemble loads that this load has started."""


class LoadFailed(InvalidArgument):
    """A model could not be loaded. ``causes`` holds the error of each version."""

    def __init__(self, name: str, causes: Mapping[str, PenstockError]) -> None:
        reasons = [f"version {version} is at UNAVAILABLE state: {error.message}" for version, error in causes.items()]
        hints = dict.fromkeys(error.hint for error in causes.values() if error.hint)
        super().__init__(f"load failed for model '{name}': {'; '.join(reasons)}", "; ".join(hints))
        self.causes = causes


class Manager:
    """The models of one server process. Used only on the event loop.

    ``preloaded`` holds versions that are already in memory, by name and version. Versions whose files have changed are not used.
    """

    def __init__(  # noqa: PLR0913 - collaborators and keyword-only options
        self,
        served: ServedModels,
        assembler: Assembler,
        layout: Layout,
        load_options: LoadOptions,
        preloaded: Mapping[tuple[str, str], Preloaded] = {},
        load: Callable[[Layout, ModelSource, str, LoadOptions], LoadedVersion | LoadedPipeline] = load_any,
        *,
        is_explicit: bool = False,
        takes_files: bool = False,
        seats: Seats | None = None,
    ) -> None:
        self._served = served
        self._assembler = assembler
        self._layout = layout
        self._load_options = load_options
        self._preloaded = dict(preloaded)
        self._load_now = load
        self.is_explicit = is_explicit
        """True if clients may load and unload."""
        self.takes_files = takes_files
        """True if clients may send model files in a request to load a model. Such files may contain code."""
        self._models: dict[str, ManagedModel] = {}
        self._missing: set[str] = set()
        self._seats = seats or Seats(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._retirement = Retirement()
        self._loading: dict[asyncio.Future[Any], str] = {}
        self._seen: dict[str, str] = {}
        self._is_closed = False
        self._level = logging.DEBUG
        """Log level for successful loads: DEBUG during start-up, where the ready line already lists the models."""

    @property
    def is_complete(self) -> bool:
        """True if every model that the server loads by itself is served."""
        return not self._missing

    async def start(
        self, wanted: Mapping[str, Override | None], threads: int, at_start: int
    ) -> dict[str, PenstockError]:
        """Load the models ``wanted`` and return the failures by name. Up to ``at_start`` of these loads run concurrently. Later, up
        to ``threads`` loads run concurrently.
        """
        self._seats.count = max(threads, at_start)
        work = (self.load(name, override, is_due=True) for name, override in wanted.items())
        outcomes = await asyncio.gather(*work, return_exceptions=True)
        self._preloaded.clear()
        self._seats.count = threads
        self._level = logging.INFO
        for outcome in outcomes:
            if outcome is not None and not isinstance(outcome, PenstockError):
                raise outcome
        return {name: one for name, one in zip(wanted, outcomes, strict=True) if isinstance(one, PenstockError)}

    async def index(self) -> list[Row]:
        """The repository index: the states of requested models, and the names of all other models in the repositories."""
        names = set[str]()
        try:
            names.update(await on_daemon_thread("list-models", self._layout.models))
        except PenstockError as error:
            _log.warning("%s", error)
        for name in [name for name, model in self._models.items() if name not in names and model.is_idle]:
            del self._models[name]  # its folder was removed
        return [row for name in sorted(names | self._models.keys()) for row in rows(name, self._models.get(name))]

    # Requests

    async def load(
        self, name: str, override: Override | None = None, *, is_part: bool = False, is_due: bool = False
    ) -> None:
        """Load or reload model ``name`` from the repositories, with the configuration and files of ``override`` if given.

        Returns when the model, and every ensemble that was unloaded together with it, is ready. Keeps versions that have not
        changed. Pass ``is_part`` if an ensemble needs the model. Pass ``is_due`` if the server loads the model by itself, and is not
        ready until the model is served. With either flag, an earlier override stays in effect. Raises PenstockError if there is no
        such model, LoadFailed or InvalidConfig if loading fails, and Unavailable during shutdown.
        """
        if self._is_closed:
            raise Unavailable(f"model '{name}' cannot be loaded: the server is shutting down")
        model = self._models.setdefault(name, ManagedModel(name))
        model.is_wanted = model.is_wanted or not is_part
        followers = await asyncio.shield(self._begin_load(model, override, is_due, keeps_override=is_part or is_due))
        if followers and not is_part:  # a part must not wait for an ensemble that waits for this part
            await asyncio.wait(followers)

    async def unload(self, name: str, *, with_parts: bool = False) -> None:
        """Stop serving model ``name``, and every ensemble that needs it, until the model is loaded again.

        Returns immediately. Accepted requests are still answered. ``with_parts`` also unloads models loaded only for this one.
        """
        if (model := self._models.get(name)) is None:
            return
        model.is_wanted = False
        model.end_loads("it is being unloaded")
        await asyncio.shield(self._begin(model, self._unload(model, with_parts)))

    async def changes(self) -> list[tuple[str, bool]]:
        """The names of models whose files differ from the loaded files, and whether the files exist.

        A change is reported once, and only after two consecutive calls have seen the same files, because a copy of the files may be
        in progress. Raises NotFound for a missing repository.
        """
        found, before = await on_daemon_thread("scan-models", self._layout.scan), self._seen
        self._seen = found
        models = self._models
        away = sorted(models.keys() - found.keys() - before.keys())
        gone = [name for name in away if models[name].served or name in self._missing]
        changed = [
            name for name in sorted(found) if before.get(name) == found[name] and self._differs(name, found[name])
        ]
        for name in changed:
            models.setdefault(name, ManagedModel(name)).tried = found[name]
        return [*((name, False) for name in gone), *((name, True) for name in changed)]

    def _differs(self, name: str, fingerprint: str) -> bool:
        model = self._models.get(name)
        return model is None or fingerprint not in (model.tried, model.source and model.source.fingerprint)

    def loaded_by_name(self) -> list[tuple[str, Override | None]]:
        """The models that were loaded by name, with their overrides. A process that joins the server later loads these models."""
        return [(name, model.override) for name, model in self._models.items() if model.is_wanted and model.served]

    def end_loads(self) -> None:
        """Refuse further loads, and end the child processes that are still loading their models."""
        self._is_closed = True
        for model in self._models.values():
            model.end_loads("the server is shutting down")

    async def close(self, timeout_s: float) -> list[str]:
        """Refuse further operations, and wait up to ``timeout_s`` seconds for running loads. Returns the models still loading.

        While such a load runs in an engine's native code, a regular exit could crash the process.
        """
        self.end_loads()
        for task in self._tasks:
            task.cancel()
        if self._loading:
            await asyncio.wait(self._loading, timeout=timeout_s)
        for future in self._loading:
            if (
                future.done()
                and not future.exception()
                and isinstance(loaded := future.result(), LoadedVersion | LoadedPipeline)
            ):
                loaded.drop()
        return sorted({name for future, name in self._loading.items() if not future.done()})

    async def unload_all(self) -> None:
        """Unload all models. Returns when all requests are answered and the files of overrides are removed."""
        await asyncio.gather(self._served.unload_all(), self._retirement.finish())
        for model in self._models.values():
            for override in model.overrides:
                await on_daemon_thread("discard", partial(discard, override.folder))

    # Implementation

    def _begin_load(
        self,
        model: ManagedModel,
        override: Override | None = None,
        is_due: bool = False,
        *,
        keeps_override: bool = False,
    ) -> Loading:
        """Begin a load. If a waiting load would have the same effect, return it instead."""
        task = model.waiting
        if task is None or override is not None or (model.waiting_keeps_override and not keeps_override):
            load_options = msgspec.structs.replace(self._load_options, halt=model.halt)
            task = self._begin(model, self._load(model, load_options, override, is_due, keeps_override))
            model.waiting = task if override is None else None
            model.waiting_keeps_override = keeps_override
        return task

    def _begin(self, model: ManagedModel, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Begin the operation ``work`` on ``model``. The operation continues even if its caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        model.pending += 1

        def end(_: object) -> None:
            self._tasks.discard(task)
            model.pending -= 1
            if not task.cancelled() and (error := task.exception()) and not isinstance(error, PenstockError):
                _log.error("model '%s': an operation failed", model.name, exc_info=error)

        task.add_done_callback(end)
        return task

    async def _on_thread(
        self, verb: str, name: str, work: Callable[[], _Result], used_s: Callable[[], float | None] = lambda: None
    ) -> _Result:
        """Wait for a free seat, and run ``work()``, a part of loading model ``name``, on a thread. For ``used_s``, see ``Seats``.

        The part holds its seat even if the caller is cancelled.
        """
        try:
            future = await self._seats.begin(partial(on_daemon_thread, f"{verb}-{name}", work), used_s)
        except RuntimeError as error:
            raise ResourceExhausted(f"cannot start a thread to load a model: {error}", "raise the task limit") from None
        self._loading[future] = name
        # If this task is cancelled, ``close`` waits for the future.
        await asyncio.wait((future,))
        del self._loading[future]
        return future.result()

    async def _load(
        self,
        model: ManagedModel,
        load_options: LoadOptions,
        override: Override | None,
        is_due: bool,
        keeps_override: bool,
    ) -> list[Loading]:
        """Load or reload ``model``. Also starts and returns the loads of ensembles that need the model."""
        async with model.turn:
            model.running_options = load_options
            if model.waiting is asyncio.current_task():
                model.waiting = None
            model.generation += 1
            if override is not None and override.folder:
                hold(override.folder)
                model.overrides.append(override)
            form = model.form
            try:
                await self._bring_up(model, override, keeps_override)
                self._missing.discard(model.name)
            except PenstockError as error:
                if is_due and not model.served:
                    self._missing.add(model.name)
                if model.is_unknown and model.pending == 1:
                    self._models.pop(model.name, None)
                elif not isinstance(error, LoadFailed) and not model.is_unknown:
                    model.problem = model.problem or str(error)
                raise
            finally:
                self._retirement.clear_up(model)
            return self._follow(model, form)

    def _follow(self, model: ManagedModel, form: Mapping[str, object]) -> list[Loading]:
        """Load ensembles that were unloaded with ``model``, and reload ensembles that were built for a different ``form`` of it."""
        now, users = model.form, self._users(model.name)
        if any(now.get(version) != was for version, was in form.items()):
            for user in users:
                user.is_stale |= bool(user.served) and model.name in user.parts
        return [
            self._begin_load(user, keeps_override=True)
            for user in users
            if user.is_stale or (user.is_wanted and not user.served and not user.pending)
        ]

    async def _bring_up(self, model: ManagedModel, override: Override | None, keeps_override: bool) -> None:
        for attempt in range(_ATTEMPTS):
            source, used = await self._define(model, override, keeps_override)
            await self._load_parts(model, source)
            failures = await self._change(model, source)
            if attempt + 1 == _ATTEMPTS or not any(isinstance(error, FilesChanged) for error in failures.values()):
                break
        if failures:
            failed = LoadFailed(model.name, failures)
            _log.log(
                logging.DEBUG if self._is_closed else logging.ERROR,  # shutdown ended the load and logged this
                "model '%s', generation %d: %s", model.name, model.generation, failed,
            )  # fmt: skip
            raise failed
        model.override, model.replaced = used, source.fingerprint
        _log.log(
            self._level, "model '%s', generation %d serves %s", model.name, model.generation, ", ".join(model.served)
        )

    async def _define(
        self, model: ManagedModel, override: Override | None, keeps_override: bool
    ) -> tuple[ModelSource, Override | None]:
        """The current source of ``model``, and its override.

        If ``keeps_override``, a previous override is used unless the files that it replaces have changed.
        """
        name, kept, replaced = model.name, model.override if keeps_override else None, model.replaced

        def read() -> tuple[ModelSource, Override | None]:
            if override is None and kept is not None and self._layout.fingerprint(name) == replaced:
                return self._layout.define(name, kept), kept
            return self._layout.define(name, override), override

        try:
            source, used = await self._on_thread("read", name, read)
        except NotFound as error:
            raise PenstockError(f"failed to load '{name}', failed to poll from model repository", str(error)) from None
        except PenstockError as error:
            model.problem = str(error)
            _log.error("cannot read model '%s': %s", name, error)
            raise InvalidConfig(
                f"failed to load '{name}', failed to poll from model repository: {error.message}", error.hint
            ) from None
        model.problem, model.source = "", source
        return source, used

    async def _load_parts(self, model: ManagedModel, source: ModelSource) -> None:
        """Load the models of an ensemble. Raises InvalidConfig if a load fails, or if the ensemble contains itself."""
        for part in source.parts:
            if (known := self._models.get(part)) and known.served:
                continue
            link = part
            while link:
                if link == model.name:
                    raise InvalidConfig(f"ensemble '{model.name}' needs '{part}', which needs '{model.name}'")
                link = self._models[link].awaits if link in self._models else ""
            model.awaits = part
            try:
                await self.load(part, is_part=True)
            except PenstockError as error:
                raise InvalidConfig(f"ensemble '{model.name}' needs '{part}': {error.message}", error.hint) from None
            finally:
                model.awaits = ""

    async def _change(self, model: ManagedModel, source: ModelSource) -> dict[str, PenstockError]:
        """Load and serve the versions of ``source``. If no load fails, unload all other versions. Returns the failures by version."""
        chosen, missing = choose(source.given.version_policy, source.versions)
        if not chosen and not missing:
            raise InvalidConfig(
                f"at least one version must be available under the version policy of model '{model.name}'",
                f"put the model's files into a folder named '1'{source.no_versions and ', not '}{source.no_versions}",
            )
        steps = plan(model.served, source, chosen)
        if model.is_stale:
            steps, model.is_stale = steps._replace(load=chosen), False
        failures: dict[str, PenstockError] = {}
        for number in missing:
            reason = f"version {number} of model '{source.name}' is not in the repository"
            failures[number] = NotFound(reason, (source.versions and f"it has: {', '.join(source.versions)}") or "")
            model.versions.setdefault(number, VersionState()).fail(str(failures[number]))
        outcomes = await asyncio.gather(*(self._load_version(model, source, number) for number in steps.load))
        failures |= {number: error for number, error in zip(steps.load, outcomes, strict=True) if error is not None}
        for number in steps.resize:
            try:
                await self._resize(model.versions[number].handle, source, number, model.running_options)
            except PenstockError as error:
                model.versions[number].fail(str(error))
                failures[number] = error
        for number in model.served.keys() & {*chosen} - failures.keys():
            model.versions[number].confirm(source)
        if not failures:
            for number in model.served.keys() & {*steps.unload}:
                self._leave(model, number)
        return failures

    async def _load_version(self, model: ManagedModel, source: ModelSource, number: str) -> PenstockError | None:
        """Load one version and serve it. Returns the error if this fails, otherwise None."""
        version = model.versions.setdefault(number, VersionState())
        version.begin()
        try:
            handle = await self._make(source, number, model.running_options)
        except PenstockError as error:
            if isinstance(error, InvalidConfig) and source.written_in:
                error.message = f"{source.written_in}: {error.message.removeprefix(f'{source.written_in}: ')}"
            version.fail(str(error))
            return error
        except Exception:
            version.fail("internal error")
            raise
        handle.start()
        old = self._served.add(handle)
        version.serve(handle, source, model.generation)
        if old is not None:
            self._retirement.retire(model, old)
        return None

    async def _make(self, source: ModelSource, number: str, load_options: LoadOptions) -> Handle:
        if source.is_ensemble:
            return self._assembler.assemble_ensemble(source, number)
        preloaded = self._preloaded.pop((source.name, number), None)
        if preloaded is not None and preloaded.resolved.source.fingerprint == source.fingerprint:
            work: Callable[[], LoadedVersion | LoadedPipeline] = partial(warm, preloaded, load_options)
        else:
            work = partial(self._load_now, self._layout, source, number, load_options)
        loaded = await self._on_thread("load", source.name, work, load_options.halt.used_s)
        try:
            if isinstance(loaded, LoadedPipeline):
                return self._assembler.assemble_pipeline(loaded)
            return self._assembler.assemble(loaded)
        except BaseException:
            await on_daemon_thread(f"unload-{source.name}", loaded.drop)
            raise

    async def _resize(self, handle: Handle | None, source: ModelSource, number: str, load_options: LoadOptions) -> None:
        """Change the number of instances of ``handle`` to the number that ``source`` configures."""
        assert handle is not None
        wanted = source.given.instances
        if (more := wanted - handle.instance_count) > 0:
            work = partial(load_more, self._layout, source, number, load_options, handle.first_model, more)
            handle.grow(await self._on_thread("load", source.name, work, load_options.halt.used_s))
        else:
            handle.shrink(-more)

    async def _unload(self, model: ManagedModel, with_parts: bool) -> None:
        async with model.turn:
            model.generation += 1
            parts = model.source.parts if model.source else []
            # There is no await in this loop, so an ensemble is never served without its models.
            for user in reversed(self._users(model.name)):
                if user.served:
                    self._leave_all(user)
                    user.problem = f"it needs '{model.name}', which is not served"
                    if not self.is_explicit:
                        self._missing.add(user.name)
            self._leave_all(model)
            model.forget()
            self._retirement.clear_up(model)
            self._missing.discard(model.name)
            _log.info("model '%s', generation %d is unloaded", model.name, model.generation)
        for part in parts if with_parts else ():
            is_used = any(user.served for user in self._users(part))
            if part in self._models and not self._models[part].is_wanted and not is_used:
                await self.unload(part, with_parts=True)

    def _users(self, part: str) -> list[ManagedModel]:
        """The ensembles that need ``part``, directly or indirectly. An ensemble precedes ensembles that contain it."""
        names = [part]
        for name in names:
            names += [one.name for one in self._models.values() if one.name not in names and name in one.parts]
        return [self._models[name] for name in names[1:]]

    def _leave_all(self, model: ManagedModel) -> None:
        for number in model.served:
            self._leave(model, number)

    def _leave(self, model: ManagedModel, number: str) -> None:
        """Stop serving a version."""
        model.versions[number].leave()
        self._retirement.retire(model, self._served.remove(model.name, number), model.versions[number])
