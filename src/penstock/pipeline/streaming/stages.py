"""Runs a pipeline over one item or a stream of items. In a stream, the steps of different items overlap, and their model calls are
batched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.errors import PenstockError
from penstock.pipeline.executor import Told
from penstock.pipeline.function import Function
from penstock.pipeline.streaming.binding import Models, bind
from penstock.pipeline.streaming.line import Line
from penstock.pipeline.streaming.timeline import Timeline
from penstock.pipeline.value import Value
from penstock.resources import usable_cores


class Stages:
    """A function that is ready to run. Safe to use from several threads. Holds no thread between calls."""

    def __init__(self, function: Function, models: Models, outputs: Sequence[str] = ()) -> None:
        """``outputs`` are the wanted outputs; by default all. Steps that they do not need are left out."""
        self.function = function
        self._bound = bind(function, models, outputs)

    @property
    def ahead(self) -> int:
        """Default number of items in progress: two full batches of the model with the largest batches, and one for each core."""
        return (
            2 * max((spec.max_batch for spec in self._bound.stages.values() if spec.waits), default=1) + usable_cores()
        )

    def call(self, inputs: Mapping[str, Value], timeline: Timeline | None = None) -> dict[str, Value]:
        """The outputs for one item. The calling thread runs all steps. Raises PenstockError."""
        told: list[Told] = []
        with Line(self._bound, timeline=timeline) as line:
            line.begin(0, inputs, told.append)
            line.wait(lambda: bool(told))
        if isinstance(told[0], PenstockError):
            raise told[0]
        return dict(told[0])

    def stream(
        self,
        items: Iterable[Mapping[str, Value] | PenstockError],
        *,
        ahead: int | None = None,
        threads: int | None = None,
        timeline: Timeline | None = None,
    ) -> Iterator[Told]:
        """The outcome of each item, in order: the outputs or an error. An item that is an error is its own outcome.

        At most ``ahead`` items are read before their turn, on the consumer's thread. If ``items`` raises an error, it is raised after
        the outcomes of the items before. Closing the iterator cancels the items in progress and ends all threads.
        """
        threads = usable_cores() if threads is None else threads
        with Line(self._bound, threads, timeline) as line:
            yield from _in_order(line, iter(items), max(1, self.ahead if ahead is None else ahead))


def _in_order(line: Line, items: Iterator[Mapping[str, Value] | PenstockError], ahead: int) -> Iterator[Told]:
    slots: deque[list[Told]] = deque()  # for each item, its outcome, once it is known
    number, failure, is_open = 0, None, True
    while is_open or slots:
        if slots and slots[0]:
            yield slots.popleft()[0]
        elif is_open and len(slots) < ahead:
            try:
                inputs = next(items)
            except StopIteration:
                is_open = False
            except Exception as error:  # noqa: BLE001 - raised again, after the outcomes of the items before
                failure, is_open = error, False
            else:
                slots.append(slot := list[Told]())
                if isinstance(inputs, PenstockError):
                    slot.append(inputs)
                else:
                    line.begin(number, inputs, slot.append)
                number += 1
        else:
            line.wait(lambda: bool(slots[0]))
    if failure is not None:
        raise failure
