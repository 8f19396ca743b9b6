"""The attempts of one plan, in a folder: a plan that was interrupted goes on where it stopped, and decides the same.

``ledger.json`` names the plan by a digest of all that decides it and lists the attempts; ``<digest>.model`` are the models
that they made, each with its provenance. A model is there before its attempt is listed, and both appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from penstock.artifact import Artifact, Step, sha256
from penstock.bundle.evidence import Attempt
from penstock.errors import InvalidArgument, InvalidData, ResourceExhausted

_FILE = "ledger.json"
_MOST_BYTES = 64 << 20
_SUFFIXES = (".model", ".steps", ".partial")


class _Entry(msgspec.Struct, frozen=True):
    attempt: Attempt
    origin: str
    """Digest of the model that it went on from."""


class _Pages(msgspec.Struct, frozen=True):
    plan: str
    entries: tuple[_Entry, ...] = ()


class _Model(msgspec.Struct, frozen=True):
    data: bytes
    provenance: tuple[Step, ...]


class Ledger:
    """Finds and keeps attempts, by name and the digest of the model that they went on from."""

    def __init__(self, folder: Path, plan: str) -> None:
        """Raises InvalidArgument if ``folder`` is none or holds another plan, InvalidData if it is damaged."""
        self.folder = folder
        self._plan = plan
        self._entries: dict[tuple[str, str], _Entry] = {}
        if folder.exists() and not folder.is_dir():
            raise InvalidArgument(f"'{folder}' is not a folder", "name a folder for the plan, or one to be made")
        if (folder / _FILE).exists():
            self._read(folder / _FILE)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """In the order in which they were made."""
        return tuple(entry.attempt for entry in self._entries.values())

    def find(self, name: str, origin: str) -> Attempt | None:
        """The attempt of that name on the model of digest ``origin``, if it was made."""
        entry = self._entries.get((name, origin))
        return entry.attempt if entry else None

    def model(self, attempt: Attempt) -> Artifact:
        """What ``attempt`` made. Raises InvalidData if its file is missing or was changed."""
        path = self.folder / f"{attempt.digest}.model"
        model = read_model(path)
        if model.digest != attempt.digest:
            raise _damaged(path, "it was changed")
        return model

    def keep(self, model: Artifact) -> None:
        """Write a model, of an attempt that is added next, or after more time. Raises ResourceExhausted."""
        write_model(self.folder / f"{model.digest}.model", model)

    def add(self, attempt: Attempt, origin: str) -> None:
        """Keep an attempt, the model of which is there. Raises ResourceExhausted if it cannot be written."""
        self._entries[attempt.name, origin] = _Entry(attempt, origin)
        pages = _Pages(self._plan, tuple(self._entries.values()))
        _write(self.folder / _FILE, msgspec.json.format(msgspec.json.encode(pages)))

    def scratch(self, stage: str) -> Path:
        """The folder for the progress of the steps of one stage; made by who writes there."""
        return self.folder / f"{sha256(stage.encode())[:16]}.steps"

    def _read(self, path: Path) -> None:
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise _damaged(path, "it is too large")
            pages = msgspec.json.decode(path.read_bytes(), type=_Pages)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _damaged(path, str(error)) from error
        if pages.plan != self._plan:
            raise InvalidArgument(
                f"'{path.parent}' holds a plan for another model, other data, other options or another machine",
                "give another folder, or remove this one to begin anew",
            )
        for entry in pages.entries:
            digest = entry.attempt.digest
            # It becomes the name of a file.
            if (digest or entry.attempt.outcome == "kept") and not _is_digest(digest):
                raise _damaged(path, f"'{digest[:80]}' is no digest")
            self._entries[entry.attempt.name, entry.origin] = entry


def remove_plan(folder: Path) -> None:
    """Take the plan's own files out of ``folder``, and the folder if nothing else is left in it."""
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.is_dir() and path.suffix == ".steps":
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix in _SUFFIXES or path.name == _FILE:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def write_model(path: Path, model: Artifact) -> None:
    """Write ``model`` and its provenance to ``path``, whole or not at all. Raises ResourceExhausted."""
    _write(path, msgspec.msgpack.encode(_Model(model.data, model.provenance)))


def read_model(path: Path) -> Artifact:
    """What ``write_model`` wrote. Raises InvalidData if it is missing or damaged."""
    try:
        found = msgspec.msgpack.decode(path.read_bytes(), type=_Model)
    except OSError as error:
        raise _damaged(path, error.strerror or "unreadable") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    return Artifact.from_bytes(found.data, provenance=found.provenance)


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
    except OSError as error:
        raise ResourceExhausted(
            f"cannot write to '{path.parent}': {error.strerror or error}", "free some space, or choose another folder"
        ) from error


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _damaged(path: Path, why: str) -> InvalidData:
    return InvalidData(f"'{path}' is damaged: {why}", "remove the folder to begin the plan anew")
