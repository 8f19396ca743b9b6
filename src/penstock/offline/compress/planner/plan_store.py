"""Stores the attempts of one plan in a folder. An interrupted plan continues from this folder with the same decisions.

``plan.ledger`` holds the identity of the plan and the attempts. ``<digest>.model`` files hold the kept models with their provenance.
Folders ``<digest>.steps`` hold the progress of unfinished steps. Every write is atomic. The model of an attempt is written before the
attempt is recorded.
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
"""Maximum length of a value in a message. For longer values, such as digests, the message only states that they differ."""


class _Entry(msgspec.Struct, frozen=True):
    attempt: Attempt
    origin: str
    """Digest of the parent model."""


class _Pages(msgspec.Struct, frozen=True):
    plan: dict[str, str]
    entries: tuple[_Entry, ...] = ()


class PlanStore:
    """Stores attempts by name and by the digest of their parent model."""

    def __init__(self, folder: Path, plan: Mapping[str, str]) -> None:
        """``plan`` identifies the plan: its model, data, options and machine, by name.

        Raises InvalidArgument if ``folder`` is a file, is damaged, or holds another plan.
        """
        self.folder, self._plan = folder, dict(plan)
        pages = _read(folder) or _Pages(self._plan)
        _refuse_other(folder, pages.plan, self._plan)
        self._entries = {(entry.attempt.name, entry.origin): entry for entry in pages.entries}

    def find(self, name: str, origin: str) -> Attempt | None:
        """The attempt of step ``name`` on the model with digest ``origin``; None if there is none."""
        entry = self._entries.get((name, origin))
        return entry.attempt if entry else None

    def model(self, digest: str) -> Artifact:
        """A kept model. Raises InvalidArgument if the model's file is missing or was modified."""
        found = None if set(digest) - set("0123456789abcdef") else read_model(self.folder / f"{digest}{_MODEL}")
        if found is None or found.digest != digest:
            raise InvalidArgument(
                f"a model of the plan in '{self.folder}' is missing or modified", "remove the folder to start again"
            )
        return found

    def add(self, attempt: Attempt, origin: str, model: Artifact | None) -> None:
        """Store an attempt, and its model if it was kept. Raises ResourceExhausted if writing fails."""
        if model is not None:
            write_model(self.folder / f"{model.digest}{_MODEL}", model)
        self._entries[attempt.name, origin] = _Entry(attempt, origin)
        write_checkpoint(self.folder / _FILE, _Pages(self._plan, tuple(self._entries.values())), "the plan")

    def scratch(self, stage: str) -> Path:
        """The folder for the progress of one stage. The first step that writes there creates it."""
        return self.folder / f"{sha256(stage.encode())[:16]}{_STEPS}"


def check_plan(folder: Path, known: Mapping[str, str]) -> None:
    """Raise InvalidArgument if ``folder`` holds a plan whose identity differs in one of the ``known`` parts."""
    pages = _read(folder)
    if pages is not None:
        _refuse_other(folder, {name: value for name, value in pages.plan.items() if name in known}, known)


def _read(folder: Path) -> _Pages | None:
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"'{folder}' is not a folder", "name a new or an existing folder for the plan")
    return read_checkpoint(folder / _FILE, _Pages)


def _refuse_other(folder: Path, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    if there == here:
        return
    differences = [_difference(name, there.get(name, ""), here[name]) for name in here if there.get(name) != here[name]]
    raise InvalidArgument(
        f"'{folder}' holds another plan: {'; '.join(differences) or 'of another version of Penstock'}",
        "use the same model, data and options, or another folder, or remove this folder to start again",
    )


def _difference(name: str, there: str, here: str) -> str:
    is_shown = all(0 < len(value) <= _LONGEST_SHOWN and value.isprintable() for value in (there, here))
    return f"{name} {there} in the folder, {here} now" if is_shown else f"another {name}"


def remove_plan(folder: Path) -> None:
    """Remove the plan's files from ``folder``, then the folder if it is empty."""
    for path in folder.glob(f"*{_STEPS}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (*folder.glob(f"*{_MODEL}"), *folder.glob("*.partial"), folder / _FILE):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
