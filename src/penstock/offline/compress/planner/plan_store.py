"""The attempts of one plan, in a folder: a plan that was interrupted goes on where it stopped, and decides the same.

``plan.ledger`` has all that decides the plan, by name, and lists the attempts; ``<digest>.model`` are the models kept,
with their provenance, and the folders ``<digest>.steps`` the progress of steps that are under way. A model is there before its
attempt is listed, and every file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.artifact import Artifact, sha256
from penstock.bundle.evidence import Attempt
from penstock.errors import InvalidArgument
from penstock.offline.compress.checkpoint import read_checkpoint, read_model, write_checkpoint, write_model

_FILE, _MODEL, _STEPS = "plan.ledger", ".model", ".steps"
_LONGEST_SHOWN = 24
"""Letters of a part of a plan that a message shows; of longer ones, as digests are, it says only that they differ."""


class _Entry(msgspec.Struct, frozen=True):
    attempt: Attempt
    origin: str
    """Digest of the model that it went on from."""


class _Pages(msgspec.Struct, frozen=True):
    plan: dict[str, str]
    entries: tuple[_Entry, ...] = ()


class PlanStore:
    """Finds and keeps attempts, by name and the digest of the model that they went on from."""

    def __init__(self, folder: Path, plan: Mapping[str, str]) -> None:
        """``plan`` is all that decides what the attempts are, by name.

        Raises InvalidArgument if ``folder`` is none, is damaged, or holds another plan.
        """
        self.folder, self._plan = folder, dict(plan)
        pages = _read(folder) or _Pages(self._plan)
        _refuse_other(folder, pages.plan, self._plan)
        self._entries = {(entry.attempt.name, entry.origin): entry for entry in pages.entries}

    def find(self, name: str, origin: str) -> Attempt | None:
        """The attempt of that name on the model of digest ``origin``, if it was made."""
        entry = self._entries.get((name, origin))
        return entry.attempt if entry else None

    def model(self, digest: str) -> Artifact:
        """A model that was kept. Raises InvalidArgument if its file is missing or was changed."""
        found = None if set(digest) - set("0123456789abcdef") else read_model(self.folder / f"{digest}{_MODEL}")
        if found is None or found.digest != digest:
            raise InvalidArgument(f"'{self.folder}' lacks a model of its plan", "remove the folder to begin anew")
        return found

    def add(self, attempt: Attempt, origin: str, model: Artifact | None) -> None:
        """Keep an attempt, and the model if others may go on from it. Raises ResourceExhausted if it cannot be written."""
        if model is not None:
            write_model(self.folder / f"{model.digest}{_MODEL}", model)
        self._entries[attempt.name, origin] = _Entry(attempt, origin)
        write_checkpoint(self.folder / _FILE, _Pages(self._plan, tuple(self._entries.values())), "the plan")

    def scratch(self, stage: str) -> Path:
        """The folder for the progress of the steps of one stage; made by who writes there."""
        return self.folder / f"{sha256(stage.encode())[:16]}{_STEPS}"


def check_plan(folder: Path, known: Mapping[str, str]) -> None:
    """Raise InvalidArgument as ``PlanStore`` will, as far as what is ``known`` of its plan before the work tells."""
    pages = _read(folder)
    if pages is not None:
        _refuse_other(folder, {name: value for name, value in pages.plan.items() if name in known}, known)


def _read(folder: Path) -> _Pages | None:
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"'{folder}' is not a folder", "name a folder for the plan, or one to be made")
    return read_checkpoint(folder / _FILE, _Pages)


def _refuse_other(folder: Path, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    if there == here:
        return
    differences = [_difference(name, there.get(name, ""), here[name]) for name in here if there.get(name) != here[name]]
    raise InvalidArgument(
        f"'{folder}' holds another plan: {'; '.join(differences) or 'of another version of Penstock'}",
        "give what it was made with, or another folder, or remove this one to begin anew",
    )


def _difference(name: str, there: str, here: str) -> str:
    is_shown = all(0 < len(value) <= _LONGEST_SHOWN and value.isprintable() for value in (there, here))
    return f"{name} {there} there, {here} here" if is_shown else f"another {name}"


def remove_plan(folder: Path) -> None:
    """Take the plan's own files out of ``folder``, and the folder if nothing else is left in it."""
    for path in folder.glob(f"*{_STEPS}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (*folder.glob(f"*{_MODEL}"), *folder.glob("*.partial"), folder / _FILE):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
