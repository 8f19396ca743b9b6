"""What the server keeps of each sequence between its requests, for a model that keeps nothing itself: Triton's implicit state.

A model's output of one request is its input of the next. What a batch gave is kept as it is, and given to the model again without
copying if the next batch is of the same sequences; a sequence that is left out gets a copy of its row.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Rows

import msgspec
import numpy as np

from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.scheduler.sequence_slots import Sequence, Step
from penstock.tensor import Array, TensorSpec

MAX_BYTES = 4 << 30
"""Most bytes of all states on one instance, but for one batch."""


class State(msgspec.Struct, frozen=True):
    """An input of a model that is fed with its ``output`` of the request before, and with ``initial``, one row, at the start."""

    input: str
    output: TensorSpec
    initial: Array


class ImplicitStates:
    """Those of the sequences on one instance. ``gather`` and ``scatter`` belong to the instance, ``forget`` to the event loop.

    ``batchable`` tells whether the states' first axis is that of the batch.
    """

    def __init__(self, states: Rows[State], batchable: bool, max_bytes: int = MAX_BYTES) -> None:
        self._states = states
        self._batchable = batchable
        self._varies = any(-1 in state.output.shape[batchable:] for state in states)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # The rest, and the sequences' states, are guarded by the lock.
        self._kept: Mapping[str, Array] = {}
        """By input, what the latest batch gave."""
        self._rows: dict[Sequence, int] = {}
        """Whose state is in which of its rows."""
        self._count = 0
        """How many rows it has."""
        self._alone = 0
        """Bytes of states that sequences have for themselves."""

    def key(self, step: Step) -> tuple[tuple[int, ...], ...]:
        """What must be equal for requests to be merged, once those before them in their sequences have ended."""
        if not self._varies:
            return ()
        known = () if step.start or step.sequence is None else step.sequence.shapes
        return known or tuple(state.initial.shape for state in self._states)

    def gather(self, rows: Rows[Step | None]) -> Mapping[str, Array]:
        """The inputs for a batch; a row is None if there is no request for it, and its state is then of no meaning."""
        if not self._states:
            return {}
        with self._lock:
            for step in rows:
                if step is not None and step.start:
                    self._drop(step.sequence)
            if len(rows) != self._count or any(
                step is not None and self._rows.get(step.sequence) != number for number, step in enumerate(rows)
            ):
                return {state.input: self._merge(state, rows) for state in self._states}
            present = {step.sequence for step in rows if step is not None}
            self._part(present)
            return self._kept

    def scatter(self, rows: Rows[Step | None], outputs: Mapping[str, Array]) -> None:
        """Keep what the model gave for the batch. Raises PenstockError, with all states as they were, if it cannot be."""
        if not self._states:
            return
        given = {state.input: self._checked(state, len(rows), outputs) for state in self._states}
        with self._lock:
            if self._alone + sum(map(_size, given.values())) > self._max_bytes:
                raise ResourceExhausted(
                    f"the states of the model's sequences take more than {self._max_bytes} bytes",
                    "end sequences that are not used any more, or let fewer be candidates",
                )
            batch = {step.sequence: number for number, step in enumerate(rows) if step is not None}
            self._part(batch.keys())
            shapes = tuple((1, *one.shape[1:]) if self._batchable else one.shape for one in given.values())
            for sequence in batch:
                self._release(sequence)
                sequence.shapes = shapes
            over = {step.sequence for step in rows if step is not None and step.last}
            self._kept, self._count = given, len(rows)
            # A sequence without a place was ended while the model ran.
            self._rows = {one: number for one, number in batch.items() if one not in over and one.place is not None}
            self._let_go()

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        if self._states:
            with self._lock:
                self._drop(sequence)

    def _merge(self, state: State, rows: Rows[Step | None]) -> Array:
        parts = [self._row(state, step.sequence) for step in rows if step is not None]
        if len(parts) < len(rows):
            present = iter(parts)
            parts = [next(present) if step is not None else parts[0] for step in rows]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _row(self, state: State, sequence: Sequence) -> Array:
        """One sequence's state, not to be written to."""
        if sequence.states:
            return sequence.states[state.input]
        number = self._rows.get(sequence)
        return state.initial if number is None else self._kept_row(state.input, number)

    def _kept_row(self, name: str, number: int) -> Array:
        array = self._kept[name]
        return array if self._count == 1 else array[number : number + 1]

    def _part(self, staying: Collection[Sequence]) -> None:
        """Give all sequences but those ``staying`` in the batch states of their own."""
        for sequence, number in tuple(self._rows.items()):
            if sequence not in staying:
                rows = {name: self._kept_row(name, number) for name in self._kept}
                # Copied, so that one sequence does not keep a whole batch in memory.
                sequence.states = rows if self._count == 1 else {name: row.copy() for name, row in rows.items()}
                self._alone += sum(map(_size, sequence.states.values()))
                del self._rows[sequence]

    def _drop(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.shapes = ()
        if self._rows.pop(sequence, None) is not None:
            self._let_go()

    def _release(self, sequence: Sequence) -> None:
        self._alone -= sum(map(_size, sequence.states.values()))
        sequence.states = {}

    def _let_go(self) -> None:
        """Of a batch of which nobody has anything any more."""
        if not self._rows:
            self._kept, self._count = {}, 0

    def _checked(self, state: State, rows: int, outputs: Mapping[str, Array]) -> Array:
        spec, array = state.output, outputs.get(state.output.name)
        if array is None:
            raise PenstockError(f"the model gave no output '{spec.name}', which is a state of its sequences")
        has_rows = not self._batchable or array.shape[:1] == (rows,)
        if array.dtype != spec.datatype.dtype or not spec.admits(array.shape) or not has_rows:
            raise PenstockError(
                f"the model's state '{spec.name}' is {array.dtype} of shape {list(array.shape)} for a batch of {rows}, "
                f"and shall be {spec.datatype.value} of {list(spec.shape)}"
            )
        return array


def _size(array: Array) -> int:
    return array.nbytes if array.dtype.kind != "O" else sum(len(one) for one in array.reshape(-1).tolist())
