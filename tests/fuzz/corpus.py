"""The messages that the repository keeps for a target: past findings, and messages that reach code that the seeds do not."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
_FINDING = "finding-"
_MAX_FILES = 24
_MAX_BYTES = 8 << 10
_MAX_MESSAGE_BYTES = 1 << 10


class Corpus:
    """The corpus of one target: a folder of files that are named by the digest of their content."""

    def __init__(self, name: str, folder: Path = FOLDER) -> None:
        self._folder = folder / name

    def paths(self) -> list[Path]:
        return sorted(self._folder.glob("*")) if self._folder.is_dir() else []

    def messages(self) -> list[bytes]:
        return [path.read_bytes() for path in self.paths()]

    def add_finding(self, data: bytes) -> Path:
        """Keep a message that did harm."""
        return self._write(_FINDING, data)

    def offer(self, data: bytes) -> None:
        """Keep a message that reached new code, unless it is long or there are many."""
        sizes = [path.stat().st_size for path in self.paths() if not path.name.startswith(_FINDING)]
        has_room = len(sizes) < _MAX_FILES and sum(sizes) + len(data) <= _MAX_BYTES
        if has_room and len(data) <= _MAX_MESSAGE_BYTES:
            self._write("", data)

    def _write(self, prefix: str, data: bytes) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{prefix}{hashlib.sha256(data).hexdigest()[:16]}"
        path.write_bytes(data)
        return path
