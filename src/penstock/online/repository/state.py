"""How it stands with models and their versions, as the index of the repository tells it. Nothing here waits, or does anything."""

from __future__ import annotations

import asyncio
import enum
from typing import Any

import msgspec

from penstock.online.instances.process_halt import Halt
from penstock.online.repository.definition import Definition
from penstock.online.repository.handle import Handle
from penstock.online.repository.override import Override
from penstock.online.repository.source import Wishes
from penstock.tensor import Signature


class State(enum.Enum):
    """In the protocol's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


NEXT = {
    None: {State.LOADING, State.UNAVAILABLE},
    State.LOADING: {State.READY, State.UNAVAILABLE},
    State.READY: {State.UNLOADING},
    State.UNLOADING: {State.UNAVAILABLE, State.LOADING},
    State.UNAVAILABLE: {State.LOADING},
}
"""The states that may follow each; a version begins without one. What is reloaded stays READY, for it goes on being served."""

Row = dict[str, Any]
"""A row of the index."""

_RESTARTING = "its instance is being started again"
_LACKS_PARTS = "a model that it needs is not ready"


class Version(msgspec.Struct):
    """One version: ``handle`` and ``definition`` are what is served of it and what that was loaded by, None unless it is READY."""

    state: State | None = None
    reason: str = ""
    handle: Handle | None = None
    definition: Definition | None = None
    generation: int = 0
    """The operation on the model that has loaded it."""
    leaving: int = 0
    """How many handles that were served have still to answer what they were asked."""

    def move(self, state: State, reason: str = "") -> None:
        assert state in NEXT[self.state], (self.state, state)
        self.state, self.reason = state, reason

    def begin(self) -> None:
        """It is being loaded."""
        if self.state is not State.READY:
            self.move(State.LOADING)

    def serve(self, handle: Handle, definition: Definition, generation: int) -> None:
        """It is served by ``handle``, from now on or instead of another."""
        if self.state is not State.READY:
            self.move(State.READY)
        self.handle, self.generation = handle, generation
        self.confirm(definition)

    def confirm(self, definition: Definition) -> None:
        """What is served of it is what ``definition`` says."""
        self.definition, self.reason = definition, ""

    def fail(self, reason: str) -> None:
        """It cannot be loaded; what was served of it before still is."""
        if self.state in (State.LOADING, None):
            self.move(State.UNAVAILABLE, reason)
        else:
            self.reason = reason

    def leave(self) -> None:
        """It is served no more, and answers what it has been asked."""
        self.move(State.UNLOADING)
        self.handle = self.definition = None
        self.leaving += 1

    def end(self) -> None:
        """What was served of it is out of memory."""
        self.leaving -= 1
        if self.state is State.UNLOADING and not self.leaving:
            self.move(State.UNAVAILABLE, "unloaded")

    def row(self, name: str, version: str, problem: str = "") -> Row:
        """``problem`` is what is wrong with the whole model."""
        state, reason = self.state or State.UNAVAILABLE, problem or self.reason
        if self.handle is not None and not self.handle.is_healthy:
            state, reason = State.UNAVAILABLE, _RESTARTING if self.handle.instance_count else _LACKS_PARTS
        row: Row = {"name": name, "version": version, "state": state.value, "reason": reason}
        return row | {"generation": self.generation} if self.generation else row


class Model:
    """A model that somebody has asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[str, Version] = {}
        self.problem = ""
        """Why none of its versions could be loaded, or why they are served no more."""
        self.definition: Definition | None = None
        """What it was when it was looked at last."""
        self.tried = ""
        """The fingerprint of what was loaded, or failed to, because its files had changed."""
        self.override: Override | None = None
        """What stands in the place of its files."""
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
        self.wishes_at_work = Wishes()
        """Those of the load at work."""
        self.awaits = ""
        """The part that its load waits for."""
        self.leaving: set[asyncio.Task[None]] = set()
        """Those at work to unload what it no longer serves."""

    @property
    def served(self) -> dict[str, Definition]:
        """By version that is served what it was loaded by."""
        return {number: one.definition for number, one in self.versions.items() if one.definition is not None}

    @property
    def parts(self) -> set[str]:
        """The models that it needs, as it is served and as it was looked at last."""
        known = [one.definition for one in self.versions.values()]
        return {part for one in (*known, self.definition) if one is not None and one.is_ensemble for part in one.parts}

    @property
    def form(self) -> dict[str, tuple[Signature, int]]:
        """What ensembles were put together by: of each version that is served, and, below the empty name, of the greatest."""
        handles = [one.handle for one in self.versions.values() if one.handle is not None]
        form = {one.version: (one.signature, one.config.max_rows) for one in handles}
        return form | {"": form[max(form, key=int)]} if form else {}

    @property
    def is_unknown(self) -> bool:
        """Whether nothing is known of it but its name."""
        return self.definition is None and not self.versions and not self.problem

    @property
    def is_idle(self) -> bool:
        """Whether nothing is served of it and nothing done, nor anything kept to serve it again by."""
        return not self.pending and not self.leaving and not self.served and self.override is None

    def end_loads(self, reason: str) -> None:
        """End those that are asked for by now, as far as they run in processes, and let those not begun fail."""
        self.waiting = None
        self.halt.end(reason)
        self.halt = Halt()

    def wishes(self, wishes: Wishes) -> Wishes:
        """``wishes`` for a load that is asked for now."""
        return msgspec.structs.replace(wishes, halt=self.halt)

    def forget(self) -> None:
        """It is as if nobody had asked for it."""
        self.problem, self.definition, self.tried, self.override, self.replaced = "", None, "", None, ""


def rows(name: str, model: Model | None) -> list[Row]:
    """What the index says of model ``name``: its versions by rising number, why there are none, or just the name."""
    if model is not None and model.versions:
        return [model.versions[number].row(name, number, model.problem) for number in sorted(model.versions, key=int)]
    if model is not None and model.problem:
        return [{"name": name, "version": "", "state": State.UNAVAILABLE.value, "reason": model.problem}]
    return [{"name": name}]
