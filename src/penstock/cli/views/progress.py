"""Progress of long operations on stderr; stdout is for results."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_EVERY_S = 5.0
"""Seconds between two lines, if stderr is not a terminal."""


class StageProgress:
    """A context manager that draws one progress bar per stage. Call it with (stage, done, total).

    Without a terminal, such as in a CI log, it prints a line with the current stage every few seconds, and nothing if the operation
    ends sooner.
    """

    def __init__(self, every_s: float = _EVERY_S) -> None:
        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
        )
        self._console = Console(stderr=True)
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._stage: TaskID | None = None
        self._every_s = every_s
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, name="progress", daemon=True)

    def __call__(self, stage: str, done: int, total: int) -> None:
        task = self._stage
        if task is None or self._progress.tasks[task].description != stage:
            self._finish()
            self._progress.start()
            task = self._stage = self._progress.add_task(stage)
        self._progress.update(task, completed=done, total=max(total, 1))

    def __enter__(self) -> Self:
        if not self._console.is_terminal:
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._console.is_terminal:
            self._ended.set()
            self._lines.join()
            return
        if error is None:
            self._finish()
        if self._stage is not None:
            self._progress.stop()  # would print a line even if the display had not started

    def _finish(self) -> None:
        """Complete the current stage."""
        if self._stage is not None:
            self._progress.update(self._stage, completed=self._progress.tasks[self._stage].total)

    def _print_lines(self) -> None:
        started = time.monotonic()
        while not self._ended.wait(self._every_s):
            if self._stage is not None:
                task = self._progress.tasks[self._stage]
                line = f"{time.monotonic() - started:4.0f} s  {task.description} {task.percentage:.0f}%"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
