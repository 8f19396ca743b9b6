"""Progress of long operations on stderr; stdout is for results."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class StageProgress:
    """A context manager that draws one progress bar per stage. Call it with (stage, done, total).

    Without a terminal, it prints one line for each finished stage, so that bars do not mix with error messages.
    """

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
        )
        self._console = Console(stderr=True)
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._stage: TaskID | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        task = self._stage
        if task is None or self._progress.tasks[task].description != stage:
            self._finish()
            self._progress.start()
            task = self._stage = self._progress.add_task(stage)
        self._progress.update(task, completed=done, total=max(total, 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish()
        if self._stage is not None and self._console.is_terminal:
            self._progress.stop()  # would print a line even if the display had not started

    def _finish(self) -> None:
        """Complete the current stage."""
        if self._stage is None:
            return
        task = self._progress.tasks[self._stage]
        self._progress.update(self._stage, completed=task.total)
        if not self._console.is_terminal:
            self._console.print(
                f"{task.description:<10} done in {task.elapsed or 0:.1f} s", markup=False, highlight=False
            )
