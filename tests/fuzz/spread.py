"""Fuzzes many targets on all cores, each in a process of its own, and survives what kills such a process."""

from __future__ import annotations

import mmap
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.fuzz.corpus import Corpus

_SIZE = struct.Struct("<I")
_MAX_BYTES = 1 << 20
_PATIENCE_S = 120.0
"""Time for a process to start, to end, and to shorten a finding."""


class LastMessage:
    """A file with the message that a process is about to try, which outlives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def writer(self) -> Callable[[bytes], None]:
        """Writes a message into the file."""
        self._path.write_bytes(bytes(_SIZE.size + _MAX_BYTES))
        with self._path.open("r+b") as file:
            place = mmap.mmap(file.fileno(), 0)

        def write(data: bytes) -> None:
            data = data[:_MAX_BYTES]
            place[: _SIZE.size] = _SIZE.pack(len(data))
            place[_SIZE.size : _SIZE.size + len(data)] = data

        return write

    def read(self) -> bytes:
        data = self._path.read_bytes()
        return data[_SIZE.size :][: _SIZE.unpack_from(data)[0]] if data else b""


def spread(names: Sequence[str], minutes: float, seed: int, cores: int, corpus: Path) -> bool:
    """Fuzz each of ``names`` for its share of ``minutes``, and print what it did; returns whether nothing was found."""
    seconds = 60 * minutes * cores / len(names)
    print(f"{len(names)} targets, {seconds:.0f} s each, {cores} at a time, seed {seed}", flush=True)
    found = []
    with ThreadPoolExecutor(cores) as pool, tempfile.TemporaryDirectory() as folder:
        pending = {pool.submit(_fuzz, name, seconds, seed, corpus, Path(folder, name)): name for name in names}
        for number, one in enumerate(as_completed(pending), 1):
            is_harmless, text = one.result()
            print(f"{100 * number // len(names):>3} %  {text}", flush=True)
            if not is_harmless:
                found.append(pending[one])
    print(f"found something in: {', '.join(found)}" if found else "found nothing")
    return not found


def command(name: str, path: Path) -> str:
    """The command that repeats a finding."""
    return f"python -m tests.fuzz {name} --replay {path}"


def _fuzz(name: str, seconds: float, seed: int, corpus: Path, path: Path) -> tuple[bool, str]:
    """Whether a process that fuzzes ``name`` finds nothing, and what it says."""
    given = [name, "--seconds", f"{seconds:g}", "--seed", str(seed), "--corpus", str(corpus), "--last", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz", *given], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=seconds + _PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return process.returncode == 0, output.rstrip() + _epitaph(name, process.returncode, corpus, path)


def _epitaph(name: str, status: int, corpus: Path, path: Path) -> str:
    """What to say of a process that a signal has ended, as a crash of the interpreter and our patience do."""
    if status >= 0:
        return ""
    kept = Corpus(name, corpus).add_finding(LastMessage(path).read())
    return f"{name}: the process ended with signal {-status}\nrepeat: {command(name, kept)}"
