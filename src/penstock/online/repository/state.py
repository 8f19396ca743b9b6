"""The states of models and their versions, as the repository index shows them. Does no I/O."""

from __future__ import annotations

import asyncio
import enum
from typing import Any

import msgspec

from penstock.errors import bounded
from penstock.online.instances.process_halt import Halt
from penstock.online.repository.handle import Handle
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.override import Override
from penstock.online.repository.resolved_version import LoadOptions
from penstock.tensor import Signature


class VersionPhase(enum.Enum):
    """The state of a version, by the protocol's names."""

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
"""The states that may follow each state. A new version has no state yet. A version stays READY while it is reloaded."""

Row = dict[str, Any]
"""A row of the index."""


class VersionState(msgspec.Struct):
    """One version of a model."""

    state: VersionPhase | None = None
    reason: str = ""
    handle: Handle | None = None
    """The handle that is served; None unless the version is READY."""
    source: ModelSource | None = None
    """The source from which ``handle`` was loaded."""
    generation: int = 0
    """The number of the operation that loaded the version."""
    leaving: int = 0
    """Number of replaced or removed handles that are still answering requests."""

    def move(self, state: VersionPhase, reason: str = "") -> None:
        assert state in NEXT[self.state], (self.state, state)
        self.state, self.reason = state, reason

    def begin(self) -> None:
        """Mark the start of a load."""
        if self.state is not VersionPhase.READY:
            self.move(VersionPhase.LOADING)

    def serve(self, handle: Handle, source: ModelSource, generation: int) -> None:
        """Record that ``handle`` now serves the version."""
        if self.state is not VersionPhase.READY:
            self.move(VersionPhase.READY)
        self.handle, self.generation = handle, generation
        self.confirm(source)

    def confirm(self, source: ModelSource) -> None:
        """Record that the served version matches ``source``."""
        self.source, self.reason = source, ""

    def fail(self, reason: str) -> None:
        """Record a failed load. If the version is being served, it stays READY."""
        if self.state in (VersionPhase.LOADING, None):
            self.move(VersionPhase.UNAVAILABLE, reason)
        else:
            self.reason = reason

    def leave(self) -> None:
        """Record that the version is no longer served. Its handle still answers accepted requests."""
        self.move(VersionPhase.UNLOADING)
        self.handle = self.source = None
        self.leaving += 1

    def end(self) -> None:
        """Record that a handle has been unloaded."""
        self.leaving -= 1
        if self.state is VersionPhase.UNLOADING and not self.leaving:
            self.move(VersionPhase.UNAVAILABLE, "unloaded")

    def row(self, name: str, version: str, problem: str = "") -> Row:
        """The version's row of the index. ``problem`` is an error that concerns the whole model."""
        state, reason = self.state or VersionPhase.UNAVAILABLE, problem or self.reason
        if self.handle is not None and not self.handle.is_healthy:
            state, reason = VersionPhase.UNAVAILABLE, "a model that it needs is not ready"
            if self.handle.instance_count:
                reason = "its instance is being restarted"
        row: Row = {"name": name, "version": version, "state": state.value, "reason": bounded(reason)}
        return row | {"generation": self.generation} if self.generation else row


class ManagedModel:
    """A model that was requested by a client, by an ensemble, or at the server's start."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[str, VersionState] = {}
        self.problem = ""
        """The reason why no version could be loaded, or why all versions were unloaded."""
        self.source: ModelSource | None = None
        """The most recently read source."""
        self.tried = ""
        """The files' fingerprint at the last load that was caused by changed files, even if that load failed."""
        self.override: Override | None = None
        """The override that replaces the repository's configuration, and possibly its files."""
        self.replaced = ""
        """The fingerprint of the files that ``override`` replaces."""
        self.overrides: list[Override] = []
        """Every override whose files may still be in use."""
        self.is_wanted = False
        """True if the model was requested by name, not only as part of an ensemble."""
        self.is_stale = False
        """True if this model is an ensemble, and the inputs or outputs of one of its models have changed."""
        self.turn = asyncio.Lock()
        """A lock that the running operation holds. Other operations wait for it in order."""
        self.generation = 0
        """Number of operations that have begun, which is also the number of the last operation."""
        self.pending = 0
        """Number of operations that have not ended."""
        self.waiting: asyncio.Task[list[Any]] | None = None
        """The last operation, if it is a load that has not begun and has no override."""
        self.waiting_keeps_override = False
        """True if the load ``waiting`` keeps a previous override."""
        self.halt = Halt(self.name)
        """Ends the child processes of loads, including loads that are requested later."""
        self.running_options = LoadOptions()
        """The options of the running load."""
        self.awaits = ""
        """For an ensemble: the model that its load is waiting for."""
        self.leaving: set[asyncio.Task[None]] = set()
        """Tasks that unload replaced or removed handles."""

    @property
    def served(self) -> dict[str, ModelSource]:
        """The sources of the served versions."""
        return {number: one.source for number, one in self.versions.items() if one.source is not None}

    @property
    def parts(self) -> set[str]:
        """For an ensemble: the models that the served versions or the most recently read source need."""
        known = [one.source for one in self.versions.values()]
        return {part for one in (*known, self.source) if one is not None for part in one.parts}

    @property
    def form(self) -> dict[str, tuple[Signature, int]]:
        """The properties of each served version on which ensembles depend. The greatest version also has an empty key."""
        handles = [one.handle for one in self.versions.values() if one.handle is not None]
        form = {one.version: (one.signature, one.config.max_rows) for one in handles}
        return form | {"": form[max(form, key=int)]} if form else {}

    @property
    def is_unknown(self) -> bool:
        """True if nothing but the model's name is known."""
        return self.source is None and not self.versions and not self.problem

    @property
    def is_idle(self) -> bool:
        """True if there is no served version, no operation, and no override."""
        return not self.pending and not self.leaving and not self.served and self.override is None

    def end_loads(self, reason: str) -> None:
        """Make waiting loads fail, and end the child processes of a running load."""
        self.waiting = None
        self.halt.end(reason)
        self.halt = Halt(self.name)

    def forget(self) -> None:
        """Restore the state that the model had before it was first requested."""
        self.problem, self.source, self.tried, self.override, self.replaced = "", None, "", None, ""


def rows(name: str, model: ManagedModel | None) -> list[Row]:
    """The rows of model ``name``: one per version, in ascending order. A model without versions has a single row, with the reason
    if known.
    """
    if model is not None and model.versions:
        return [model.versions[number].row(name, number, model.problem) for number in sorted(model.versions, key=int)]
    if model is not None and model.problem:
        return [
            {"name": name, "version": "", "state": VersionPhase.UNAVAILABLE.value, "reason": bounded(model.problem)}
        ]
    return [{"name": name}]
