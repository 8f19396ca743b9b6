"""Loads and calls functions of the user, which are named ``module:function``. What they print goes to standard error."""

from __future__ import annotations

import atexit
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from penstock.errors import InvalidArgument, PenstockError

_FUNCTION = re.compile(r"[\w.]+:\w+")


def is_function(name: str) -> bool:
    """True if ``name`` has the form ``module:function``, and no file has this name."""
    return bool(_FUNCTION.fullmatch(name)) and not Path(name).exists()


def load_function(name: str, what: str) -> Callable[..., Any]:
    """The function ``module:function``, imported as by ``load_object``. Raises InvalidArgument."""
    found = load_object(name, what)
    if not callable(found):
        raise InvalidArgument(f"the {what} '{name}' is not a function", "name a function of the module")

    def called(*arguments: object) -> Any:
        with chdir("."), apart_from_output():
            return found(*arguments)

    return called


def load_object(name: str, what: str) -> Any:
    """Import the object ``module:name``, also from the working directory. Errors call it ``what``, e.g. "metric".

    Raises InvalidArgument.
    """
    module, _, function = name.partition(":")
    here = ""
    try:
        # Files that are written later must not move if the module or the function changes the working directory.
        with chdir("."), apart_from_output():
            here = os.getcwd()
            sys.path.insert(0, here)
            found = getattr(importlib.import_module(module), function)
    except (PenstockError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - the user's module may raise SystemExit
        raise InvalidArgument(
            f"cannot load the {what} '{name}': {type(error).__name__}: {error}",
            "give a module that Python can import, and a function of this module",
        ) from None
    finally:
        if here in sys.path:
            sys.path.remove(here)
    return found


def iterated(samples: Iterable[Any]) -> Iterator[Any]:
    """The elements of an iterable of the user."""
    with chdir("."), apart_from_output():
        iterator = iter(samples)
    while True:
        # The output is redirected for one element at a time, because the caller may stop at any.
        with chdir("."), apart_from_output():
            try:
                element = next(iterator)
            except StopIteration:
                return
        yield element


@contextmanager
def apart_from_output() -> Iterator[None]:
    """Standard output stays open, and receives nothing: what the user's code prints goes to standard error."""
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        # The user's code may keep sys.stdout, for example in a handler of logging, so the replacement stays open. The code may also
        # close it, so it is not sys.stderr itself.
        with redirect_stdout(open(2, "w", buffering=1, errors="backslashreplace", closefd=False)):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        # The last function that is registered runs first, so it runs before those that the user's code has registered.
        atexit.unregister(_end_output)
        atexit.register(_end_output)


def _end_output() -> None:
    """When the process exits, the output is complete: what the user's code still prints goes to standard error."""
    with suppress(OSError, ValueError):  # closed
        sys.stdout.flush()
    with suppress(OSError):
        os.dup2(2, 1)
