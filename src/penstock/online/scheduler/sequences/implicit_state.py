"""What the server keeps of each sequence between its requests, for a model that keeps nothing itself: Triton's implicit state.

A model's output of one request is its input of the next.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import TypeGuard

import msgspec
import numpy as np

from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.scheduler.sequences.slots import Sequence, SequenceStep
from penstock.tensor import Array, TensorSpec

MAX_BYTES = 4 << 30
"""Most bytes of all states on one instance."""


class ImplicitState(msgspec.Struct, frozen=True):
    """A model's ``input`` that is fed with its ``output`` of the request before, and at the start with ``initial``, one row."""

    input: str
    output: TensorSpec
    initial: Array


class ImplicitStates:
    """Those of the sequences on one instance. ``gather`` and ``scatter`` belong to the instance, ``forget`` to the event loop.
    ``batchable``: the states' first axis is that of the batch."""

    def __init__(self, states: Rows[ImplicitState], batchable: bool, max_bytes: int = MAX_BYTES) -> None:
        self._states = states
        self._batchable = batchable
        self._varies = any(-1 in state.output.shape[batchable:] for state in states)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # The sequences' states, and how many bytes all have, are guarded by the lock.
        self._bytes = 0

    def key(self, step: SequenceStep) -> tuple[tuple[int, ...], ...]:
        """What must be equal for requests to be merged, once those before them in their sequences have ended."""
        known = {} if step.start else step.sequence.states
        return tuple([known.get(one.input, one.initial).shape for one in self._states]) if self._varies else ()

    def gather(self, rows: Rows[SequenceStep | None]) -> Mapping[str, Array]:
        """The inputs for a batch; a row is None if there is no request for it, and its state is then of no meaning."""
        with self._lock:
            alive = [step for step in rows if _is_alive(step)]
            for step in alive:
                if step.start:
                    self._keep(step.sequence, {})
            return {state.input: self._merge(state, rows) for state in self._states}

    def scatter(self, rows: Rows[SequenceStep | None], outputs: Mapping[str, Array]) -> None:
        """Keep what the model gave for the batch. Raises PenstockError, with all states as they were, if it cannot be."""
        given = {state.input: self._checked(state, len(rows), outputs) for state in self._states}
        with self._lock:
            alive = {number: step for number, step in enumerate(rows) if _is_alive(step)}
            before = sum(_size(step.sequence.states) for step in alive.values())
            if self._bytes - before + _size(given) > self._max_bytes:
                raise ResourceExhausted(
                    f"the states of the model's sequences take more than {self._max_bytes} bytes",
                    "end sequences that are not used any more, or let fewer be candidates",
                )
            for number, step in alive.items():
                self._keep(step.sequence, {} if step.last else _row(given, number, len(rows)))

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        with self._lock:
            self._keep(sequence, {})

    def _merge(self, state: ImplicitState, rows: Rows[SequenceStep | None]) -> Array:
        parts = [step.sequence.states.get(state.input, state.initial) if _is_alive(step) else None for step in rows]
        filling = next((part for part in parts if part is not None), state.initial)
        return filling if len(parts) == 1 else np.concatenate([filling if part is None else part for part in parts])

    def _keep(self, sequence: Sequence, states: dict[str, Array]) -> None:
        self._bytes += _size(states) - _size(sequence.states)
        sequence.states = states

    def _checked(self, state: ImplicitState, rows: int, outputs: Mapping[str, Array]) -> Array:
        spec, array = state.output, outputs.get(state.output.name)
        is_whole = array is not None and (not self._batchable or array.shape[:1] == (rows,))
        if array is not None and is_whole and array.dtype == spec.datatype.dtype and spec.admits(array.shape):
            return array
        got = "missing" if array is None else f"{array.dtype} of shape {list(array.shape)}"
        want = f"{spec.datatype.value} of {list(spec.shape)} for a batch of {rows}"
        raise PenstockError(
            f"the model's output '{spec.name}', a state of its sequences, is {got}, and shall be {want}"
        )


def _is_alive(step: SequenceStep | None) -> TypeGuard[SequenceStep]:
    """Not if its sequence was ended after the instance had taken it: then that may be on another instance by now."""
    return step is not None and step.sequence.place == step.place


def _row(arrays: Mapping[str, Array], number: int, rows: int) -> dict[str, Array]:
    # Copied, so that one sequence does not keep a whole batch in memory.
    return {name: one if rows == 1 else one[number : number + 1].copy() for name, one in arrays.items()}


def _size(arrays: Mapping[str, Array]) -> int:
    return sum(sum(map(len, one.flat)) if one.dtype.kind == "O" else one.nbytes for one in arrays.values())
