"""How requests of sequences become what the model is given: with controls and states, and each in its slot where those are fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.online.scheduler.implicit_state import ImplicitStates
from penstock.online.scheduler.layout import Layout
from penstock.online.scheduler.queue import Pending
from penstock.online.scheduler.sequence_controls import Control
from penstock.online.scheduler.sequence_slots import Step
from penstock.tensor import Array


class SequenceLayout:
    """Wraps ``plain``, which does the rest; a ``Layout`` of one instance, used by nothing else.

    With ``fixed`` a request's row is its slot. Rows that have no request are filled with another's inputs.
    """

    def __init__(
        self,
        plain: Layout,
        fixed: bool,
        controls: Sequence[Control],
        states: ImplicitStates,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        """``hidden`` are the outputs that clients do not get."""
        self.is_ragged = plain.is_ragged
        self._plain = plain
        self._fixed = fixed
        self._controls = controls
        self._states = states
        self._hidden = hidden

    def gather(self, requests: Sequence[Pending]) -> Mapping[str, Array]:
        rows = self._rows(requests)
        steps = [step_of(pending) if pending is not None else None for pending in rows]
        for step in steps:
            if step is not None:
                step.began = True
        inputs = dict(self._plain.gather([pending or requests[0] for pending in rows]))
        inputs.update((control.name, control.of(steps)) for control in self._controls)
        inputs.update(self._states.gather(steps))
        return inputs

    def scatter(self, requests: Sequence[Pending], outputs: dict[str, Array]) -> list[dict[str, Array]]:
        """As ``Layout.scatter``; raises PenstockError also if there is no room for the states, or they are none."""
        rows = self._rows(requests)
        shown = {name: array for name, array in outputs.items() if name not in self._hidden}
        parts = self._plain.scatter([pending or requests[0] for pending in rows], shown)
        # Last, so that nothing that fails has changed a state.
        self._states.scatter([step_of(pending) if pending is not None else None for pending in rows], outputs)
        if not self._fixed:
            return parts
        return [parts[step_of(pending).place.slot] for pending in requests]

    def _rows(self, requests: Sequence[Pending]) -> Sequence[Pending | None]:
        """Who is in which row."""
        if not self._fixed:
            return requests
        by_slot = {step_of(pending).place.slot: pending for pending in requests}
        return [by_slot.get(slot) for slot in range(max(by_slot) + 1)]


def step_of(pending: Pending) -> Step:
    """What a request of a sequence is there."""
    step = pending.request.step
    assert isinstance(step, Step)
    return step
