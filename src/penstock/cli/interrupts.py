"""Signals that end a command.

During a build, once candidates are measured, the first Ctrl-C ends the budget and the second ends the command.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from penstock.offline.deadline import BuildDeadline


@contextmanager
def finishing_early(deadline: BuildDeadline) -> Iterator[None]:
    """Within this block, the first interrupt after a measurement calls ``deadline.expire``. Others raise KeyboardInterrupt."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler:
        yield  # the program has another handler, or ignores interrupts
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not deadline.has_result:
            signal.default_int_handler(number, frame)
        signal.signal(number, signal.default_int_handler)
        deadline.expire()
        print("\ninterrupted: packing the best so far; press Ctrl-C again to stop without a bundle", file=sys.stderr)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


@contextmanager
def terminating_cleanly() -> Iterator[None]:
    """Within this block, SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that temporary folders are removed."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # the program has another handler, or ignores the signal
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
