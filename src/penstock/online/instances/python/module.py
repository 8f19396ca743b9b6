"""Imports a ``model.py``, and describes its errors."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from penstock.artifact import Artifact
from penstock.errors import InvalidModel, PenstockError, bounded
from penstock.online.instances.python.host import here

MODULE = "model"
_MAX_CHARS = 500
"""Length limit of an error message."""
_TRACEBACK_BYTES = 8 << 10


def import_model(artifact: Artifact) -> ModuleType:
    """Run ``artifact``'s source as the module ``model``. Adds the folders of the version and of the model to ``sys.path``.

    A process runs only one model, so the name ``model`` is not in use. Raises any exception of the source.
    """
    if artifact.path is not None:
        folder = artifact.path.resolve().parent
        sys.path[:0] = [str(folder), str(folder.parent)]
    module = sys.modules[MODULE] = ModuleType(MODULE)
    file = module.__file__ = source_file(artifact)
    exec(compile(artifact.data, file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - it is the model
    return module


def source_file(artifact: Artifact) -> str:
    return str(artifact.path.resolve()) if artifact.path is not None else "<model.py>"


@contextmanager
def model_errors(file: str, doing: str) -> Iterator[None]:
    """Convert exceptions of the model's code to InvalidModel with the line number in ``file``. Logs the traceback."""
    try:
        yield
    except PenstockError:
        raise
    except BaseException as error:  # SystemExit and CancelledError too: the model raised them
        log(error)
        line = _line(error, file)
        where = f" in line {line}" if line else ""
        raise InvalidModel(
            f"{Path(file).name} failed{where} {doing}: {reason(error)}", "correct the model's code"
        ) from error


def log(error: BaseException) -> None:
    """Write the traceback of ``error`` to the server's log. The middle of a long traceback is omitted."""
    text = "".join(traceback.format_exception(error)).rstrip()
    here.host.say(logging.ERROR, bounded(text, _TRACEBACK_BYTES))


def reason(error: BaseException) -> str:
    """The type and message of ``error`` in one line."""
    lines = traceback.format_exception_only(error)
    name = type(error).__name__
    if isinstance(error, SyntaxError):  # Python prints the line of the source first
        lines = [line for line in lines if line.startswith(name)]
    return in_brief(lines[0] if lines else name)


def in_brief(text: str) -> str:
    """``text`` in one line of limited length."""
    line = " ".join(text[: 2 * _MAX_CHARS].split())
    return line if len(line) <= _MAX_CHARS else f"{line[: _MAX_CHARS - 1]}…"


def _line(error: BaseException, file: str) -> int:
    """The number of the innermost line of ``file`` in the traceback of ``error``; 0 if the traceback does not contain ``file``."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno or 0
    lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else 0
