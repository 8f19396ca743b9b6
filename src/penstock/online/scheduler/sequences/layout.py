"""The batch layout for sequences. It adds control inputs and states, and can give each sequence a fixed row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.online.scheduler.layout import BatchLayout
from penstock.online.scheduler.queue import Pending
from penstock.online.scheduler.sequences.controls import Control
from penstock.online.scheduler.sequences.implicit_state import ImplicitStates
from penstock.online.scheduler.sequences.slots import SequenceStep
from penstock.tensor import Array


class SequenceLayout:
    """The ``BatchLayout`` of one instance. It extends the layout ``plain``.

    With ``fixed``, the row of a request is the number of its slot. Rows without a request repeat the inputs of another row.
    ``hidden`` outputs are states, which clients do not receive.
    """

    def __init__(
        self,
        plain: BatchLayout,
        fixed: bool,
        controls: Sequence[Control],
        states: ImplicitStates,
        hidden: frozenset[str],
    ) -> None:
        self.is_ragged = plain.is_ragged
        self._plain = plain
        self._fixed = fixed
        self._controls = controls
        self._states = states
        self._hidden = hidden

    def gather(self, requests: Sequence[Pending]) -> Mapping[str, Array]:
        rows, steps = self._rows(requests)
        for pending in requests:
            _step(pending).began = True
        inputs = dict(self._plain.gather(rows))
        inputs.update((control.name, control.of(steps)) for control in self._controls)
        inputs.update(self._states.gather(steps))
        return inputs

    def scatter(self, requests: Sequence[Pending], outputs: dict[str, Array]) -> list[dict[str, Array]]:
        rows, steps = self._rows(requests)
        parts = self._plain.scatter(rows, {name: outputs[name] for name in outputs if name not in self._hidden})
        # States are stored last, so that a failure changes no state.
        self._states.scatter(steps, outputs)
        return [parts[_step(pending).place.slot] for pending in requests] if self._fixed else parts

    def _rows(self, requests: Sequence[Pending]) -> tuple[Sequence[Pending], Sequence[SequenceStep | None]]:
        """For each row, the request that fills it, and the request's sequence step, if any."""
        if not self._fixed:
            return requests, [_step(pending) for pending in requests]
        by_slot = {_step(pending).place.slot: pending for pending in requests}
        rows = [by_slot.get(slot) for slot in range(max(by_slot) + 1)]
        return [one or requests[0] for one in rows], [None if one is None else _step(one) for one in rows]


def _step(pending: Pending) -> SequenceStep:
    assert isinstance(pending.request.step, SequenceStep)
    return pending.request.step
