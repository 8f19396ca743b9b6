"""Importing a ``model.py``, and telling what went wrong in it."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from penstock.artifact import Artifact
from penstock.errors import InvalidModel, PenstockError
from penstock.online.instances.python.host import here

MODULE = "model"
_MOST = 500
"""Most characters of an error message."""


def import_model(artifact: Artifact) -> ModuleType:
    """Run ``artifact``'s source as the module ``model``, with its version's and its model's folder searched for other modules.

    The process runs only this model, so these names are free. Raises what the source raises.
    """
    if artifact.path is not None:
        folder = artifact.path.resolve().parent
        sys.path[:0] = [str(folder), str(folder.parent)]
    file = source_file(artifact)
    module = ModuleType(MODULE)
    module.__file__ = file
    sys.modules[MODULE] = module
    exec(compile(artifact.data, file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - it is the model
    return module


def source_file(artifact: Artifact) -> str:
    return str(artifact.path.resolve()) if artifact.path is not None else "<model.py>"


@contextmanager
def told(file: str, doing: str) -> Iterator[None]:
    """Raise an InvalidModel, with the line of ``file``, for what the model's code raises in ``doing``; the log has the whole."""
    try:
        yield
    except PenstockError:
        raise
    except BaseException as error:  # an exit, a cancelled task: whatever it is, it is the model's
        log(error)
        line = _line(error, file)
        where = f" in line {line}" if line else ""
        raise InvalidModel(
            f"{Path(file).name} failed{where} {doing}: {reason(error)}", "mend the model's code"
        ) from error


def log(error: BaseException) -> None:
    """Have the server's log hold what Python prints of ``error``."""
    here.host.say(logging.ERROR, "".join(traceback.format_exception(error)).rstrip())


def reason(error: BaseException) -> str:
    """The type of ``error`` and what it says, in one line."""
    lines = traceback.format_exception_only(error)
    # That of a syntax error comes after the line of the source; notes come after all.
    told = (
        (line for line in lines if line.startswith(type(error).__name__)) if isinstance(error, SyntaxError) else lines
    )
    return in_brief(next(iter(told), type(error).__name__))


def in_brief(text: str) -> str:
    """``text`` in one line that an answer can hold."""
    line = " ".join(text[: 2 * _MOST].split())
    return line if len(line) <= _MOST else f"{line[: _MOST - 1]}…"


def _line(error: BaseException, file: str) -> int:
    """The last line of ``file`` on the way to ``error``; 0 if there is none."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno or 0
    lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else 0
