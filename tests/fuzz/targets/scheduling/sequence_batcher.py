"""Fuzzes the batcher of sequences whole: requests, cancellations, idle sequences, failing and dying models, in any order.

A request holds the number of its sequence and its own, so that the model notices a request in the slot of another sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import PenstockError, Unavailable
from penstock.online.scheduler.base import InstanceDied
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.layout import MergedRows
from penstock.online.scheduler.sequences.batcher import SequenceBatcher, SequencingConfig
from penstock.online.scheduler.sequences.controls import Control, ControlKind
from penstock.online.scheduler.sequences.slots import SequenceStep
from penstock.request import Deadline, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import BatchTimes
from penstock.tensor import DataType
from tests.fuzz.mutator import Seed
from tests.fuzz.target import Script, Target
from tests.turns import Turns

_CONTROLS = Control("START", ControlKind.START, DataType.INT32), Control("READY", ControlKind.READY, DataType.INT32)
_TIMES = BatchTimes(0, 0, 0, 0)
_SLOTS = 2
_INSTANCES = 2
_IDS = 6
_MOST = 60
_STEPS = 256
"""Most requests of one sequence."""


class _Instance:
    """Runs batches, and remembers the last request in each slot."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.last: list[int] = [0] * _SLOTS

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        numbers, start, ready = (inputs[name][:, 0].tolist() for name in ("x", "START", "READY"))
        for slot, number in enumerate(map(int, numbers)):
            if ready[slot]:
                is_same = self.last[slot] // _STEPS == number // _STEPS
                assert start[slot] or is_same, "a request runs in the slot of another sequence"
                assert start[slot] or self.last[slot] < number, "requests of a sequence run out of order"
                self.last[slot] = number
        return {"y": inputs["x"]}


class _Scene:
    def __init__(self) -> None:
        self.loop = Turns()
        batching = BatchingConfig(batchable=True, max_batch=_SLOTS, max_queue=20, stateful=True)
        config = SequencingConfig(batching, _SLOTS, fixed=True, controls=_CONTROLS, instances=_INSTANCES)
        self.batcher = SequenceBatcher(config, MergedRows(), self.loop, now_ns=self.loop.now_ns)  # type: ignore[arg-type]
        self.instances = [_Instance() for _ in range(_INSTANCES)]
        self.asked: list[tuple[int, list[Outcome]]] = []
        self.steps: list[SequenceStep] = []
        self._numbers = dict.fromkeys(range(1, _IDS + 1), 0)
        self._sequences = 0

    def submit(self, script: Script) -> None:
        identity, start, end = 1 + script.number(_IDS), not script.number(3), not script.number(4)
        if start:
            self._sequences += 1
            self._numbers[identity] = self._sequences * _STEPS
        self._numbers[identity] += 1
        number = self._numbers[identity]
        request = InferRequest("m", {"x": np.full((1, 1), number, np.float32)}, "1")
        request.sequence_id, request.sequence_start, request.sequence_end = identity, start, end
        if not script.number(6):
            request.deadline = Deadline(self.loop.clock.now() + 0.1 * script.number(4))
        outcomes: list[Outcome] = []
        try:
            step = self.batcher.submit(request, 1, None, outcomes.append)
        except PenstockError:
            assert not outcomes, "a refused request is answered"
            return
        self.asked.append((number, outcomes))
        self.steps.append(step)

    def take(self, number: int) -> None:
        self.loop.turn()
        instance, batcher = self.instances[number], self.batcher.batchers[number]
        if instance.batch is None:
            expired, formed = batcher._decide(self.loop.now_ns())
            batcher._drop(expired, formed.late)
            if isinstance(formed, Batch):
                instance.batch = batcher.take()

    def finish(self, number: int, script: Script) -> None:
        instance, batcher = self.instances[number], self.batcher.batchers[number]
        batch, instance.batch = instance.batch, None
        if batch is None:
            return
        outcome: Any
        match script.number(8):
            case 0:
                outcome = Unavailable("the model failed")
            case 1:
                outcome = InstanceDied("the model's process died")
                instance.last = [0] * _SLOTS
            case _:
                outcome = batcher.layout.scatter(
                    batch.requests, instance.forward(batcher.layout.gather(batch.requests))
                )
        batcher.finish(batch, outcome, _TIMES)
        self.loop.turn()

    def check(self) -> None:
        for number, outcomes in self.asked:
            assert len(outcomes) <= 1, "a request is answered twice"
            for outcome in outcomes:
                if isinstance(outcome, InferResponse):
                    assert outcome.outputs["y"].item() == number, "a request has the answer to another"
        waiting = sum(not outcomes for _, outcomes in self.asked)
        assert self.batcher.statistics.pending == waiting, "the count of requests is wrong"

    def end(self) -> None:
        """All requests are answered, and all sequences end."""
        for _ in range(3 * len(self.asked) + 3):
            for number in range(_INSTANCES):
                self.take(number)
                self.finish(number, Script(b"\7"))
            self.loop.turn()
            self.loop.advance(0.2)
        self.loop.advance(2)
        self.check()
        assert all(len(outcomes) == 1 for _, outcomes in self.asked), "a request is never answered"
        assert not len(self.batcher._table), "a sequence never ends"


class SequenceBatcherTarget(Target):
    """See ``Target``."""

    def __init__(self) -> None:
        self.seeds: Sequence[Seed] = [
            tuple(bytes((n * step % 229,)) for n in range(start, start + 80))
            for start in range(4)
            for step in (1, 7, 13)
        ]

    def run(self, data: bytes) -> None:
        script, scene = Script(data[:600]), _Scene()
        while not script.is_over and len(scene.asked) < _MOST:
            match script.number(7):
                case 0 | 1 | 2:
                    scene.submit(script)
                case 3:
                    scene.take(script.number(_INSTANCES))
                case 4:
                    scene.finish(script.number(_INSTANCES), script)
                case 5 if scene.steps:
                    scene.steps[script.number(len(scene.steps))].cancel()
                case _:
                    scene.loop.turn()
                    scene.loop.advance(script.choice((0.0, 0.05, 0.4, 1.5)))
            scene.check()
        scene.end()
