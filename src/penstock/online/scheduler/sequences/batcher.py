"""The scheduler of a stateful model. The requests of one sequence run on one instance, one at a time, in order of arrival.

Each instance has a ``DynamicBatcher``, which merges requests as for any model. A request reaches this batcher when the previous
request of its sequence has ended. All code here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import msgspec

from penstock.errors import Cancelled, InvalidArgument, PenstockError, Unavailable
from penstock.online.scheduler.answers import tell
from penstock.online.scheduler.base import InstanceDied
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.layout import BatchLayout
from penstock.online.scheduler.sequences.controls import Control, ControlKind
from penstock.online.scheduler.sequences.implicit_state import ImplicitState, ImplicitStates
from penstock.online.scheduler.sequences.layout import SequenceLayout
from penstock.online.scheduler.sequences.slots import Sequence as Known
from penstock.online.scheduler.sequences.slots import SequenceId, SequenceStep, SequenceTable
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import Failure, ModelStatistics
from penstock.telemetry.tracing import Tracer

_TOO_LATE = "timeout of the corresponding sequence has been expired", "one of its requests could not run in time"
_LOST = "the state of the sequence was lost with the model's process", "start the sequence again"


class SequencingConfig(msgspec.Struct, frozen=True):
    """The sequence batching of one model version."""

    batching: BatchingConfig
    """The batching settings of one instance. ``max_queue`` is the limit for the whole model."""
    slots: int
    """Maximum number of active sequences on one instance. With ``fixed``, it must not exceed ``max_batch``."""
    fixed: bool = False
    """True if a sequence has the same row in all batches (Triton's strategy ``direct``); False for the strategy ``oldest``."""
    idle_us: int = 1_000_000
    """Duration without requests after which a sequence ends."""
    controls: tuple[Control, ...] = ()
    states: tuple[ImplicitState, ...] = ()
    hidden: frozenset[str] = frozenset()
    """The outputs that hold states. Clients do not receive these outputs."""
    instances: int = 1


class SequenceBatcher:
    """The ``Scheduler`` that the module's docstring describes. Instance n takes batches from ``batchers[n]``.

    ``plain`` is the layout without controls and states.
    """

    def __init__(
        self,
        config: SequencingConfig,
        plain: BatchLayout,
        loop: asyncio.AbstractEventLoop,
        statistics: ModelStatistics | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        tracer: Tracer | None = None,
    ) -> None:
        self._config = config
        self._statistics = ModelStatistics() if statistics is None else statistics
        self._loop = loop
        self._now_ns = now_ns
        self._table = SequenceTable(config.instances, config.slots)
        self._states = [ImplicitStates(config.states, config.batching.batchable) for _ in range(config.instances)]
        layouts = [SequenceLayout(plain, config.fixed, config.controls, one, config.hidden) for one in self._states]
        self.batchers = [
            DynamicBatcher(config.batching, loop, self._statistics, now_ns, tracer, layout) for layout in layouts
        ]
        self._names = [control for control in config.controls if control.kind is ControlKind.CORRID]
        self._is_ending = self._is_settling = False
        self._emptied = asyncio.Event()

    @property
    def config(self) -> BatchingConfig:
        return self._config.batching

    @property
    def statistics(self) -> ModelStatistics:
        for batcher in self.batchers:
            self._statistics = batcher.statistics  # the same object; each access updates it
        return self._statistics

    def submit(self, request: InferRequest, rows: int, key: Hashable, done: Done) -> SequenceStep:
        """See ``Scheduler.submit``. Raises InvalidArgument if the request has no sequence id, or its sequence has not started."""
        statistics, now_ns = self._statistics, self._now_ns()
        sequence = self._table.find(request.sequence_id)
        try:
            self._check(request, rows, sequence)
        except PenstockError as error:
            statistics.failed(Failure.of(error), now_ns, now_ns)
            raise
        step = SequenceStep(
            self._cancel, sequence, request, key, done, now_ns, request.sequence_start, request.sequence_end
        )
        request.step = step
        _stop_timer(sequence)
        statistics.pending += 1
        self._table.add(step)
        self._settle(step)
        if step.pending is None and request.deadline is not None:
            left_s = max(0.0, request.deadline.at - now_ns / 1e9)
            step.timer = self._loop.call_later(left_s, partial(self._give_up, step, Unavailable(*_TOO_LATE)))
        return step

    def hurry(self) -> None:
        """See ``Scheduler``."""
        for batcher in self.batchers:
            batcher.hurry()

    async def drain(self) -> None:
        """Refuse new sequences, and wait until all sequences have ended. A sequence ends when it has no requests left."""
        self._is_ending = True
        for sequence in self._table:
            _stop_timer(sequence)
            self._rest(sequence)
        while self._table:
            self._emptied.clear()
            await self._emptied.wait()

    def stop(self) -> None:
        """Refuse further requests. Instances end when their queues are empty."""
        self._is_ending = True
        for batcher in self.batchers:
            batcher.stop()

    def _cancel(self, step: SequenceStep) -> None:
        """Cancel a request. If the request has not reached its instance, its sequence ends too."""
        if step.pending is not None:
            step.pending.cancel()
        else:
            self._give_up(step, Cancelled("the request was cancelled"))

    def _check(self, request: InferRequest, rows: int, sequence: Known) -> None:
        name, identity = request.model_name, request.sequence_id
        asked = f"inference request to model '{name}' must specify"
        if self._is_ending and not sequence.is_open:
            raise Unavailable(f"model '{name}' is being unloaded")
        if self._statistics.pending >= self.config.max_queue:
            raise Unavailable(f"the queue of model '{name}' is full", "try again later")
        if rows != 1:
            raise InvalidArgument(f"{asked} batch-size 1 due to requirements of sequence batcher")
        if not identity:
            raise InvalidArgument(f"{asked} a non-zero or non-empty correlation ID")
        for control in self._names:
            control.check(identity, name)
        if not request.sequence_start and not sequence.is_open:
            raise _not_started(identity, name)

    def _settle(self, own: SequenceStep | None = None) -> None:
        """Process all ready requests and ended sequences. Repeats this, because the end of a request may start or end others.

        Raises the batcher's error if the batcher refuses ``own``.
        """
        if self._is_settling:
            return
        self._is_settling, table, refusal = True, self._table, None
        while table.over or table.ready:
            if table.over:
                instance, sequence = table.over.popleft()
                self._states[instance].forget(sequence)
                continue
            step = table.ready.popleft()
            if step.request is None:
                continue  # cancelled in the callback of another answer
            try:
                self._give(step, step.request)
            except PenstockError as error:
                if step is own:
                    step.done, refusal = None, error
                self._answer(step, error)
        self._is_settling = False
        if refusal is not None:
            raise refusal

    def _give(self, step: SequenceStep, request: InferRequest) -> None:
        """Submit a request to the batcher of its instance. From now on, that batcher counts the request."""
        self._statistics.pending -= 1
        step.request = None
        _stop_timer(step)
        instance = step.place.instance
        key = step.key, self._states[instance].key(step)
        pending = self.batchers[instance].submit(request, 1, key, partial(self._answer, step))
        step.pending, pending.arrived_ns = pending, step.arrived_ns

    def _answer(self, step: SequenceStep, outcome: Outcome) -> None:
        """Receive the answer to a request from its batcher."""
        if isinstance(outcome, InferResponse) and not outcome.final:
            tell(step.done, outcome)
            return
        told = outcome if step.verdict is None or isinstance(outcome, InstanceDied) else step.verdict
        done, step.done, step.pending, others = step.done, None, None, list[SequenceStep]()
        is_lost = step.verdict is not None or not step.began
        # The model starts the sequence even if the client has cancelled the request.
        if isinstance(told, PenstockError) and (is_lost or (step.start and not isinstance(told, Cancelled))):
            others = self._table.give_up(step)[1:]
        else:
            # After any answer, the model has run this request, or will run it before the next request of the sequence.
            self._table.finish(step)
        error = told if isinstance(told, Cancelled | Unavailable) else Unavailable(*_TOO_LATE) if is_lost else None
        self._tell(step.sequence, [(done, told), *self._drop(others, error)])
        if isinstance(outcome, InstanceDied) and not self._config.states:
            self._lose(step.place.instance)

    def _drop(self, steps: Sequence[SequenceStep], error: PenstockError | None) -> list[tuple[Done | None, Outcome]]:
        """End ``steps``, the requests that follow a failed request of the same sequence. Returns their callbacks and errors.

        ``error`` is None if the first request failed in the model, so that the sequence never started.
        """
        ended: list[tuple[Done | None, Outcome]] = []
        for step in steps:
            assert step.request is not None
            told = error or _not_started(
                step.sequence.id, step.request.model_name, "its first request failed; start again"
            )
            ended.append((step.done, told))
            step.done, step.request = None, None
            _stop_timer(step)
            self._statistics.pending -= 1
            self._statistics.failed(Failure.of(told), step.arrived_ns, self._now_ns())
        return ended

    def _tell(self, sequence: Known, ended: Sequence[tuple[Done | None, Outcome]]) -> None:
        """Call the callbacks of ended requests, then continue with the remaining requests. A callback may cancel other requests."""
        for done, outcome in ended:
            tell(done, outcome)
        self._settle()
        self._rest(sequence)

    def _lose(self, instance: int) -> None:
        """End the sequences on ``instance``, whose model has lost their states."""
        for sequence in self._table:
            if sequence.place is None or sequence.place.instance != instance:
                continue
            step = sequence.running
            if step is None:
                self._end(sequence)
            elif step.pending is not None and not step.start:
                # If a step has begun, an instance took it after the loss but before the event loop was notified.
                step.verdict = Unavailable(*_LOST)
                if not step.began:
                    step.pending.cancel()

    def _rest(self, sequence: Known) -> None:
        """Start the idle timer of a sequence without requests."""
        if sequence.place is not None and sequence.is_idle and sequence.timer is None:
            left_s = 0 if self._is_ending else self._config.idle_us / 1e6
            sequence.timer = self._loop.call_later(left_s, partial(self._end, sequence))
        if not self._table:
            self._emptied.set()

    def _end(self, sequence: Known) -> None:
        """End a sequence that has been idle too long."""
        _stop_timer(sequence)
        self._table.end(sequence)
        self._settle()
        self._rest(sequence)

    def _give_up(self, step: SequenceStep, error: PenstockError) -> None:
        """End a request that has not reached its instance, and its sequence."""
        if step.done is not None:
            self._tell(step.sequence, self._drop(self._table.give_up(step), error))


def _not_started(identity: SequenceId, model: str, hint: str = "") -> InvalidArgument:
    return InvalidArgument(
        f"inference request for sequence {identity} to model '{model}' must specify the START flag on the first request of the "
        "sequence",
        hint,
    )


def _stop_timer(one: SequenceStep | Known) -> None:
    if one.timer is not None:
        one.timer.cancel()
        one.timer = None
