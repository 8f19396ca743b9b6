"""Triton's implicit state: between the requests of a sequence, the server keeps the sequence's state for the model.

An output of one request becomes an input of the sequence's next request.
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
"""Maximum bytes of all states on one instance."""


class ImplicitState(msgspec.Struct, frozen=True):
    """One state of a model. Its ``input`` receives the ``output`` of the sequence's previous request. The first request receives
    ``initial``, which has one row.
    """

    input: str
    output: TensorSpec
    initial: Array


class ImplicitStates:
    """The states of the sequences on one instance. The instance calls ``gather`` and ``scatter``; the event loop calls ``forget``.

    ``batchable`` is true if the first axis of the states is the batch axis.
    """

    def __init__(self, states: Rows[ImplicitState], batchable: bool, max_bytes: int = MAX_BYTES) -> None:
        self._states = states
        self._batchable = batchable
        self._varies = any(-1 in state.output.shape[batchable:] for state in states)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # The lock guards the states of the sequences, and this size:
        self._bytes = 0

    def key(self, step: SequenceStep) -> tuple[tuple[int, ...], ...]:
        """The shapes of the states as a key. Only requests with equal keys can be merged."""
        known = {} if step.start else step.sequence.states
        return tuple([known.get(one.input, one.initial).shape for one in self._states]) if self._varies else ()

    def gather(self, rows: Rows[SequenceStep | None]) -> Mapping[str, Array]:
        """The state inputs of a batch. A row is None if it has no request; its state is then arbitrary."""
        with self._lock:
            alive = [step for step in rows if _is_alive(step)]
            for step in alive:
                if step.start:
                    self._keep(step.sequence, {})
            return {state.input: self._merge(state, rows) for state in self._states}

    def scatter(self, rows: Rows[SequenceStep | None], outputs: Mapping[str, Array]) -> None:
        """Store the state outputs of a batch. If an output is invalid, raises PenstockError and changes no state."""
        given = {state.input: self._checked(state, len(rows), outputs) for state in self._states}
        with self._lock:
            alive = {number: step for number, step in enumerate(rows) if _is_alive(step)}
            before = sum(_size(step.sequence.states) for step in alive.values())
            if self._bytes - before + _size(given) > self._max_bytes:
                raise ResourceExhausted(
                    f"the states of the model's sequences need more than the limit of {self._max_bytes} bytes",
                    "end unused sequences, or lower 'max_candidate_sequences'",
                )
            for number, step in alive.items():
                self._keep(step.sequence, {} if step.last else _row(given, number, len(rows)))

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that has ended."""
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
        raise PenstockError(f"the model's state output '{spec.name}' is {got}, must be {want}")


def _is_alive(step: SequenceStep | None) -> TypeGuard[SequenceStep]:
    """False if the sequence has ended. A new sequence with the same id may already be on another instance."""
    return step is not None and step.sequence.place == step.place


def _row(arrays: Mapping[str, Array], number: int, rows: int) -> dict[str, Array]:
    # Copies, because views of one sequence would keep the whole batch in memory.
    return {name: one if rows == 1 else one[number : number + 1].copy() for name, one in arrays.items()}


def _size(arrays: Mapping[str, Array]) -> int:
    return sum(sum(map(len, one.flat)) if one.dtype.kind == "O" else one.nbytes for one in arrays.values())
