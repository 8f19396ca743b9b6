"""The attempts of one plan, in a folder: a plan that was interrupted goes on where it stopped, and decides the same.

``ledger.json`` names the plan by a digest of all that decides it and lists the attempts; ``<digest>.onnx`` are the models
that they made. A model is there before its attempt is listed, and both appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from penstock.artifact import Artifact, Step, sha256
from penstock.bundle.evidence import Attempt
from penstock.errors import InvalidArgument, InvalidData, ResourceExhausted

_FILE = "ledger.json"
_MOST_BYTES = 64 << 20


class _Entry(msgspec.Struct, frozen=True):
    attempt: Attempt
    provenance: tuple[Step, ...] = ()


class _Pages(msgspec.Struct, frozen=True):
    plan: str
    entries: tuple[_Entry, ...] = ()


class Ledger:
    """Finds and keeps attempts. Without a folder it only remembers."""

    def __init__(self, folder: Path | None, plan: str) -> None:
        """Raises InvalidArgument if ``folder`` holds another plan, InvalidData if it is damaged."""
        self._folder = folder
        self._plan = plan
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._models: dict[str, Artifact] = {}
        if folder is not None and (folder / _FILE).exists():
            self._read(folder / _FILE)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """In the order in which they were made."""
        return tuple(entry.attempt for entry in self._entries.values())

    def find(self, name: str, parent: str) -> Attempt | None:
        """The attempt of that name after ``parent``, if it was made."""
        entry = self._entries.get((name, parent))
        return entry.attempt if entry else None

    def model(self, attempt: Attempt) -> Artifact:
        """What ``attempt`` made. Raises InvalidData if its file is missing or was changed."""
        if attempt.digest not in self._models:
            assert self._folder is not None
            path = self._folder / f"{attempt.digest}.onnx"
            try:
                data = path.read_bytes()
            except OSError as error:
                raise _damaged(path, error.strerror or "unreadable") from error
            if sha256(data) != attempt.digest:
                raise _damaged(path, "it was changed")
            provenance = self._entries[attempt.name, attempt.parent].provenance
            self._models[attempt.digest] = Artifact.from_bytes(data, provenance=provenance)
        return self._models[attempt.digest]

    def add(self, attempt: Attempt, model: Artifact | None) -> None:
        """Keep an attempt and what it made. Raises ResourceExhausted if it cannot be written."""
        if model is not None:
            self._models[model.digest] = model
        provenance = model.provenance if model else ()
        self._entries[attempt.name, attempt.parent] = _Entry(attempt, provenance)
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if model is not None:
                _write(self._folder / f"{model.digest}.onnx", model.data)
            pages = _Pages(self._plan, tuple(self._entries.values()))
            _write(self._folder / _FILE, msgspec.json.format(msgspec.json.encode(pages)))
        except OSError as error:
            raise ResourceExhausted(
                f"cannot write to '{self._folder}': {error.strerror}", "free some space, or choose another folder"
            ) from error

    def _read(self, path: Path) -> None:
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise _damaged(path, "it is too large")
            pages = msgspec.json.decode(path.read_bytes(), type=_Pages)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _damaged(path, str(error)) from error
        if pages.plan != self._plan:
            raise InvalidArgument(
                f"'{path.parent}' holds a plan for another model, other data or other options",
                "give another folder, or remove this one to begin anew",
            )
        for entry in pages.entries:
            digest = entry.attempt.digest
            if digest and (len(digest) != 64 or not set(digest) <= set("0123456789abcdef")):
                raise _damaged(path, f"'{digest}' is no digest")
            self._entries[entry.attempt.name, entry.attempt.parent] = entry


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
        partial = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
    partial.replace(path)


def _damaged(path: Path, why: str) -> InvalidData:
    return InvalidData(f"'{path}' is damaged: {why}", "remove the folder to begin the plan anew")
