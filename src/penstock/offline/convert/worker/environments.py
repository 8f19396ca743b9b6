"""Environments with the packages of one framework, which ``--isolated`` makes once and keeps.

Requirements that clash with those of the user's environment, such as an old protobuf, never reach it. An environment is a venv in
``$XDG_CACHE_HOME/penstock/environments``. Its name contains the digest of the requirements and of the interpreter. Its mark is
written last, so an environment without a mark is incomplete, and is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.errors import PermissionDenied, ResourceExhausted, Unavailable, Unsupported, bounded
from penstock.offline.convert.registry import FormatEntry

Progress = Callable[[str], None]
BASE = ("ml_dtypes>=0.5", "msgspec>=0.19", "numpy", "onnx>=1.17")
"""What ``worker/serve.py`` and every converter import, in addition to Penstock's own modules."""
_MARK = "penstock.complete"
_ELSEWHERE = ("PIP_PREFIX", "PIP_PYTHON", "PIP_ROOT", "PIP_TARGET", "PIP_USER")
"""Settings of pip that would install the packages in another place."""
_SHOWN = ("Collecting ", "Downloading ", "Building ", "Installing ")


def environment(entry: FormatEntry, progress: Progress = lambda _: None, base: Sequence[str] = BASE) -> Path:
    """The interpreter of the environment for ``entry``, which is made on the first call. Reports steps to ``progress``.

    Raises Unsupported if the format has no isolated environment, Unavailable if its packages cannot be installed, PermissionDenied
    or ResourceExhausted if the cache folder cannot be used. An interrupted call leaves nothing that a later one would use.
    """
    if not entry.isolated:
        raise Unsupported(f"{entry.title} has no isolated environment", "leave out --isolated")
    requirements = sorted({*base, *entry.isolated})
    facts = [*requirements, platform.python_version(), platform.machine(), sys.base_prefix]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    folder = cache_folder("environments") / f"{entry.extra}-{digest}"
    python = folder / "bin" / "python"
    with _lock(folder.with_suffix(".lock"), entry, progress):
        if not ((folder / _MARK).exists() and python.exists()):
            _make(folder, entry, requirements, progress)
    return python


def cache_folder(kind: str) -> Path:
    """The folder for files of a ``kind`` that can be made again. Nobody else may write to it, because some are programs."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / "penstock" / kind
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ResourceExhausted(
            f"the cache folder '{folder}' cannot be made: {error.strerror}", "set XDG_CACHE_HOME to another folder"
        ) from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionDenied(
            f"other users can write to the cache folder '{folder}'", "make it yours alone, or set XDG_CACHE_HOME"
        )
    return folder


@contextlib.contextmanager
def _lock(path: Path, entry: FormatEntry, progress: Progress) -> Iterator[None]:
    """Hold a lock that the kernel releases if this process ends."""
    try:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"waiting for another process that prepares {entry.title}")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ResourceExhausted(
            f"the environment for {entry.title} cannot be kept in '{path.parent}': {error.strerror}",
            "free some space, or set XDG_CACHE_HOME to another folder",
        ) from error


def _make(folder: Path, entry: FormatEntry, requirements: Sequence[str], progress: Progress) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    try:
        progress(f"making an environment for {entry.title}")
        _run([sys.executable, "-I", "-m", "venv", str(folder)], entry, progress)
        options = ("--no-input", "--disable-pip-version-check", "--progress-bar=off", "--prefer-binary", "--retries=2")
        _run([str(python), "-I", "-m", "pip", "install", *options, *requirements], entry, progress)
        (folder / _MARK).write_text("\n".join(requirements), "utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(command: Sequence[str], entry: FormatEntry, progress: Progress) -> None:
    """Run one command to its end, in a group that is killed if this call is interrupted. Raises Unavailable if it fails."""
    with tempfile.TemporaryDirectory(prefix="penstock-pip-") as folder:
        process = subprocess.Popen(  # noqa: S603 - venv and pip, with requirements of Penstock
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in _ELSEWHERE} | {"TMPDIR": folder},
        )
        lines: list[str] = []
        try:
            assert process.stdout is not None
            for line in map(str.strip, process.stdout):
                lines = [*lines[-50:], line]
                if line.startswith(_SHOWN):
                    progress(bounded(line, 120))
            process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            with process:
                pass
    if process.returncode:
        raise _failure(lines, entry)


def _failure(lines: Sequence[str], entry: FormatEntry) -> Unavailable | ResourceExhausted:
    """One error for all that pip or venv printed."""
    errors = [line.partition("ERROR: ")[2] for line in lines if line.startswith("ERROR: ")]
    reason = bounded((errors or [line for line in lines if line][-1:] or [""])[0], 400)
    everything = " ".join(lines)
    if "No space left" in everything or "Disk quota" in everything:
        return ResourceExhausted(
            f"the environment for {entry.title} does not fit: {reason}",
            "set XDG_CACHE_HOME to a folder on another disk",
        )
    hint = "check that pip can install these packages here: " + " ".join(entry.isolated)
    if "ensurepip" in everything:
        hint = "install Python's modules for environments, such as the package 'python3-venv' of Debian"
    elif "connection broken" in everything:
        reason, hint = "the package index cannot be reached", "check the connection, and pip's settings"
    return Unavailable(f"the environment for {entry.title} cannot be made: {reason}", hint)
