"""Progress of long operations, drawn on stderr; stdout is for results."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class StageProgress:
    """A context manager that draws one bar per stage. Call it with (stage, done, total)."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
        )
        # Without a terminal, only finished bars are printed, which keeps logs short.
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._finish_all()
            self._tasks[stage] = self._progress.add_task(stage)
        self._progress.update(self._tasks[stage], completed=done, total=max(total, 1))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish_all()
        self._progress.stop()

    def _finish_all(self) -> None:
        for task in self._progress.tasks:
            if task.total and not task.finished:
                self._progress.update(task.id, completed=task.total)
