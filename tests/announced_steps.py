"""Runs work in steps, and keeps what each step announced."""

from typing import TypeVar

from penstock.online.server.to_thread import Steps

Result = TypeVar("Result")


def announced(steps: Steps[Result]) -> tuple[list[int], Result]:
    """The sizes that ``steps`` announced, and the result."""
    sizes: list[int] = []
    while True:
        try:
            sizes.append(next(steps))
        except StopIteration as end:
            return sizes, end.value
