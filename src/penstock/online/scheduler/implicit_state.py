"""What the server keeps of each sequence between its requests, for a model that keeps nothing itself: Triton's implicit state.

A model's output of one request is its input of the next. What a batch gave is kept as it is, and given to the model again without
copying if the next batch is of the same sequences; a sequence that is left out gets a copy of its row.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from collections.abc import Sequence as Rows

import msgspec
import numpy as np

from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.scheduler.sequence_slots import Sequence, Step
from penstock.tensor import Array, TensorSpec

MAX_BYTES = 4 << 30
"""Most bytes of all states on one instance, but for one batch."""


class State(msgspec.Struct, frozen=True):
    """A model's ``input`` that is fed with its ``output`` of the request before, and at the start with ``initial``, one row."""

    input: str
    output: TensorSpec
    initial: Array


class ImplicitStates:
    """Those of the sequences on one instance. ``gather`` and ``scatter`` belong to the instance, ``forget`` to the event loop.
    ``batchable``: the states' first axis is that of the batch."""

    def __init__(self, states: Rows[State], batchable: bool, max_bytes: int = MAX_BYTES) -> None:
        self._states = states
        self._batchable = batchable
        self._varies = any(-1 in state.output.shape[batchable:] for state in states)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # The rest, and the sequences' states, are guarded by the lock.
        self._kept: Mapping[str, Array] = {}  # by input, what the latest batch gave
        self._count = 0  # its rows
        self._rows: dict[Sequence, int] = {}  # whose state is in which of them
        self._alone = 0  # bytes of states that sequences have for themselves

    def key(self, step: Step) -> tuple[tuple[int, ...], ...]:
        """What must be equal for requests to be merged, once those before them in their sequences have ended."""
        known = () if step.start else step.sequence.shapes
        return (known or tuple(state.initial.shape for state in self._states)) if self._varies else ()

    def gather(self, rows: Rows[Step | None]) -> Mapping[str, Array]:
        """The inputs for a batch; a row is None if there is no request for it, and its state is then of no meaning."""
        with self._lock:
            rows = _alive(rows)
            for step in rows:
                if step is not None and step.start:
                    self._drop(step.sequence)
            batch = _batch(rows)
            if len(rows) != self._count or any(self._rows.get(one) != row for one, row in batch.items()):
                return {state.input: self._merge(state, rows) for state in self._states}
            self._part(batch)
            return self._kept

    def scatter(self, rows: Rows[Step | None], outputs: Mapping[str, Array]) -> None:
        """Keep what the model gave for the batch. Raises PenstockError, with all states as they were, if it cannot be."""
        given = {state.input: self._checked(state, len(rows), outputs) for state in self._states}
        with self._lock:
            if self._alone + sum(map(_size, given.values())) > self._max_bytes:
                raise ResourceExhausted(
                    f"the states of the model's sequences take more than {self._max_bytes} bytes",
                    "end sequences that are not used any more, or let fewer be candidates",
                )
            rows = _alive(rows)
            batch = _batch(rows)
            self._part(batch)
            for sequence in batch:
                self._release(sequence)
                sequence.shapes = tuple((1, *one.shape[1:]) if self._batchable else one.shape for one in given.values())
            self._kept, self._count, self._rows = (given, len(rows), batch) if batch else ({}, 0, {})
            for step in rows:
                if step is not None and step.last:
                    self._drop(step.sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        with self._lock:
            self._drop(sequence)

    def _merge(self, state: State, rows: Rows[Step | None]) -> Array:
        parts = [self._row(state, step.sequence) if step is not None else None for step in rows]
        filling = next((part for part in parts if part is not None), state.initial)
        return filling if len(parts) == 1 else np.concatenate([filling if part is None else part for part in parts])

    def _row(self, state: State, sequence: Sequence) -> Array:
        if sequence.states:
            return sequence.states[state.input]
        number = self._rows.get(sequence)
        return state.initial if number is None else self._kept_row(state.input, number)

    def _kept_row(self, name: str, number: int) -> Array:
        array = self._kept[name]
        return array if self._count == 1 else array[number : number + 1]

    def _part(self, batch: Mapping[Sequence, int]) -> None:
        """Give sequences that are not in ``batch`` states of their own."""
        for sequence in self._rows.keys() - batch.keys():
            number = self._rows.pop(sequence)
            rows = {name: self._kept_row(name, number) for name in self._kept}
            # Copied, so that one sequence does not keep a whole batch in memory.
            sequence.states = rows if self._count == 1 else {name: row.copy() for name, row in rows.items()}
            self._alone += sum(map(_size, sequence.states.values()))

    def _drop(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.shapes = ()
        self._rows.pop(sequence, None)
        if not self._rows:
            self._kept, self._count = {}, 0

    def _release(self, sequence: Sequence) -> None:
        self._alone -= sum(map(_size, sequence.states.values()))
        sequence.states = {}

    def _checked(self, state: State, rows: int, outputs: Mapping[str, Array]) -> Array:
        spec, array = state.output, outputs.get(state.output.name)
        is_whole = array is not None and (not self._batchable or array.shape[:1] == (rows,))
        if array is not None and is_whole and array.dtype == spec.datatype.dtype and spec.admits(array.shape):
            return array
        got = "missing" if array is None else f"{array.dtype} of shape {list(array.shape)}"
        want = f"{spec.datatype.value} of {list(spec.shape)} for a batch of {rows}"
        raise PenstockError(
            f"the model's output '{spec.name}', a state of its sequences, is {got}, and shall be {want}"
        )


def _alive(rows: Rows[Step | None]) -> Rows[Step | None]:
    """``rows`` without those whose sequence was ended after the instance had taken them, and may be on another by now."""
    return [step if step is not None and step.sequence.place == step.place else None for step in rows]


def _batch(rows: Rows[Step | None]) -> dict[Sequence, int]:
    return {step.sequence: number for number, step in enumerate(rows) if step is not None}


def _size(array: Array) -> int:
    return array.nbytes if array.dtype.kind != "O" else sum(len(one) for one in array.reshape(-1).tolist())
