"""The states of models and their versions, as the repository index shows them. Pure bookkeeping."""

from __future__ import annotations

import asyncio
import enum
from typing import Any

import msgspec

from penstock.online.instances.process_halt import Halt
from penstock.online.repository.handle import Handle
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.override import Override
from penstock.online.repository.resolved_version import LoadOptions
from penstock.tensor import Signature


class VersionPhase(enum.Enum):
    """In the protocol's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


NEXT = {
    None: {VersionPhase.LOADING, VersionPhase.UNAVAILABLE},
    VersionPhase.LOADING: {VersionPhase.READY, VersionPhase.UNAVAILABLE},
    VersionPhase.READY: {VersionPhase.UNLOADING},
    VersionPhase.UNLOADING: {VersionPhase.UNAVAILABLE, VersionPhase.LOADING},
    VersionPhase.UNAVAILABLE: {VersionPhase.LOADING},
}
"""The states that may follow each; a version begins without one. What is reloaded stays READY, for it goes on being served."""

Row = dict[str, Any]
"""A row of the index."""

_RESTARTING = "its instance is being started again"
_LACKS_PARTS = "a model that it needs is not ready"


class VersionState(msgspec.Struct):
    """One version: ``handle`` and ``source`` are what is served of it and what that was loaded by, None unless it is READY."""

    state: VersionPhase | None = None
    reason: str = ""
    handle: Handle | None = None
    source: ModelSource | None = None
    generation: int = 0
    """The operation on the model that has loaded it."""
    leaving: int = 0
    """How many handles that were served have still to answer what they were asked."""

    def move(self, state: VersionPhase, reason: str = "") -> None:
        assert state in NEXT[self.state], (self.state, state)
        self.state, self.reason = state, reason

    def begin(self) -> None:
        """It is being loaded."""
        if self.state is not VersionPhase.READY:
            self.move(VersionPhase.LOADING)

    def serve(self, handle: Handle, source: ModelSource, generation: int) -> None:
        """It is served by ``handle``, from now on or instead of another."""
        if self.state is not VersionPhase.READY:
            self.move(VersionPhase.READY)
        self.handle, self.generation = handle, generation
        self.confirm(source)

    def confirm(self, source: ModelSource) -> None:
        """What is served of it is what ``source`` says."""
        self.source, self.reason = source, ""

    def fail(self, reason: str) -> None:
        """It cannot be loaded; what was served of it before still is."""
        if self.state in (VersionPhase.LOADING, None):
            self.move(VersionPhase.UNAVAILABLE, reason)
        else:
            self.reason = reason

    def leave(self) -> None:
        """It is served no more, and answers what it has been asked."""
        self.move(VersionPhase.UNLOADING)
        self.handle = self.source = None
        self.leaving += 1

    def end(self) -> None:
        """What was served of it is out of memory."""
        self.leaving -= 1
        if self.state is VersionPhase.UNLOADING and not self.leaving:
            self.move(VersionPhase.UNAVAILABLE, "unloaded")

    def row(self, name: str, version: str, problem: str = "") -> Row:
        """``problem`` is what is wrong with the whole model."""
        state, reason = self.state or VersionPhase.UNAVAILABLE, problem or self.reason
        if self.handle is not None and not self.handle.is_healthy:
            state, reason = VersionPhase.UNAVAILABLE, _RESTARTING if self.handle.instance_count else _LACKS_PARTS
        row: Row = {"name": name, "version": version, "state": state.value, "reason": reason}
        return row | {"generation": self.generation} if self.generation else row


class ManagedModel:
    """A model that somebody has asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[str, VersionState] = {}
        self.problem = ""
        """Why none of its versions could be loaded, or why they are served no more."""
        self.source: ModelSource | None = None
        """What it was when it was looked at last."""
        self.tried = ""
        """The fingerprint of what was loaded, or failed to, because its files had changed."""
        self.override: Override | None = None
        """Replaces its configuration, and perhaps its files."""
        self.replaced = ""
        """The fingerprint of those files."""
        self.overrides: list[Override] = []
        """All whose files may still be in use."""
        self.is_wanted = False
        """Whether it was asked for by name, and not just for an ensemble that it is a part of."""
        self.is_stale = False
        """Whether it is an ensemble that has parts which have other tensors by now."""
        self.turn = asyncio.Lock()
        """Held by the operation that is at work; others wait in order."""
        self.generation = 0
        """How many operations have begun."""
        self.pending = 0
        """How many have not ended."""
        self.waiting: asyncio.Task[list[Any]] | None = None
        """The last of them, if it has not begun and is a load with nothing put in the files' place."""
        self.halt = Halt()
        """Of the loads that are asked for from now on."""
        self.load_options_at_work = LoadOptions()
        """Those of the load at work."""
        self.awaits = ""
        """The part that its load waits for."""
        self.leaving: set[asyncio.Task[None]] = set()
        """Those at work to unload what it no longer serves."""

    @property
    def served(self) -> dict[str, ModelSource]:
        """By version that is served what it was loaded by."""
        return {number: one.source for number, one in self.versions.items() if one.source is not None}

    @property
    def parts(self) -> set[str]:
        """The models that it needs, as it is served and as it was looked at last."""
        known = [one.source for one in self.versions.values()]
        return {part for one in (*known, self.source) if one is not None and one.is_ensemble for part in one.parts}

    @property
    def form(self) -> dict[str, tuple[Signature, int]]:
        """What ensembles were put together by: of each version that is served, and, below the empty name, of the greatest."""
        handles = [one.handle for one in self.versions.values() if one.handle is not None]
        form = {one.version: (one.signature, one.config.max_rows) for one in handles}
        return form | {"": form[max(form, key=int)]} if form else {}

    @property
    def is_unknown(self) -> bool:
        """Whether nothing is known of it but its name."""
        return self.source is None and not self.versions and not self.problem

    @property
    def is_idle(self) -> bool:
        """Whether nothing is served of it and nothing done, nor anything kept to serve it again by."""
        return not self.pending and not self.leaving and not self.served and self.override is None

    def end_loads(self, reason: str) -> None:
        """End those that are asked for by now, as far as they run in processes, and let those not begun fail."""
        self.waiting = None
        self.halt.end(reason)
        self.halt = Halt()

    def load_options(self, load_options: LoadOptions) -> LoadOptions:
        """``load_options`` for a load that is asked for now."""
        return msgspec.structs.replace(load_options, halt=self.halt)

    def forget(self) -> None:
        """Return to the state before the first request to load it."""
        self.problem, self.source, self.tried, self.override, self.replaced = "", None, "", None, ""


def rows(name: str, model: ManagedModel | None) -> list[Row]:
    """What the index says of model ``name``: its versions by rising number, why there are none, or just the name."""
    if model is not None and model.versions:
        return [model.versions[number].row(name, number, model.problem) for number in sorted(model.versions, key=int)]
    if model is not None and model.problem:
        return [{"name": name, "version": "", "state": VersionPhase.UNAVAILABLE.value, "reason": model.problem}]
    return [{"name": name}]
