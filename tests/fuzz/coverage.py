"""Which lines of a package have run, so that messages that reach new ones can be kept.

Tracing is slow, so functions whose lines have all run are not traced any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import penstock

_PACKAGE = str(Path(penstock.__file__).parent)


class Coverage:
    """The lines below ``folder`` that have not run yet, of all functions that have been called. Sees the current thread only."""

    def __init__(self, folder: str = _PACKAGE) -> None:
        self.reached = 0
        """Lines that have run."""
        self._folder = folder
        # By id, since hashing a code object hashes its constants; the code is kept, so that the id stays its own.
        self._known: dict[int, tuple[CodeType, set[int]]] = {}

    def run(self, work: Callable[[], None]) -> bool:
        """Call ``work``; returns whether it has run a new line."""
        reached, before = self.reached, sys.gettrace()
        sys.settrace(self._enter)
        try:
            work()
        finally:
            sys.settrace(before)
        return self.reached > reached

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return self._pass if self._missing(frame.f_code) else None

    def _pass(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        missing = self._missing(frame.f_code)
        if event == "line" and frame.f_lineno in missing:
            missing.remove(frame.f_lineno)
            self.reached += 1
        return self._pass if missing else None

    def _missing(self, code: CodeType) -> set[int]:
        known = self._known.get(id(code))
        if known is None:
            is_ours = code.co_filename.startswith(self._folder)
            lines = {line for *_, line in code.co_lines() if line is not None} if is_ours else set[int]()
            known = self._known[id(code)] = code, lines - {code.co_firstlineno}
        return known[1]
