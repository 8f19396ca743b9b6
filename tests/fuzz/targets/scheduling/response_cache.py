"""Fuzzes the response cache: equal requests that join, leave, expire and are answered, in any order, with a second tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.errors import Cancelled, InvalidArgument, Unavailable
from penstock.online.cache.answer import CachedAnswer, freeze
from penstock.online.cache.response_cache import ModelCache, ResponseCache
from penstock.online.scheduler.base import Cancellable
from penstock.request import Deadline, Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import ModelStatistics
from tests.fuzz.fast_loop import FastLoop
from tests.fuzz.mutator import Seed
from tests.fuzz.target import Script, Target

_MAX_BYTES = 8000
_MAX_WAITING = 6


class _Work:
    """A request at the scheduler, or a look-up in the second tier."""

    def __init__(self, done: Callable[..., None], value: float = 0) -> None:
        self.done = done
        self.value = value
        self.is_over = False

    def end(self, outcome: Outcome | CachedAnswer | None) -> None:
        if not self.is_over:
            self.is_over = True
            self.done(outcome)

    def cancel(self) -> None:
        self.end(Cancelled("the request was cancelled"))


class _Lookup(_Work):
    def cancel(self) -> None:
        self.is_over = True


class _Scene:
    """The cache, the requests, and what the scheduler and the second tier have to do."""

    def __init__(self, loop: FastLoop, script: Script) -> None:
        self._loop, self._script = loop, script
        self.work: list[_Work] = []
        self.asked: list[tuple[list[Outcome], float]] = []
        self.pending: list[Cancellable] = []
        self.cache = ResponseCache(_MAX_BYTES, loop, self if script.number(2) else None)
        self.statistics = ModelStatistics(name="m", version="1")
        self.model: ModelCache = self.cache.of("identity", "1", self.statistics, _MAX_WAITING)

    # The second tier

    def get(self, key: bytes, done: Callable[[CachedAnswer | None], None]) -> Cancellable | None:
        if self._script.number(3) == 0:
            done(None)
            return None
        self.work.append(work := _Lookup(done))
        return work

    def put(self, key: bytes, answer: CachedAnswer) -> None:
        assert answer.size_bytes

    async def close(self) -> None:
        pass

    def ask(self) -> None:
        value, size = float(self._script.number(3)), self._script.choice((1, 1, 100, 2000))
        deadline = Deadline(self._loop.now() + self._script.number(3)) if self._script.number(3) == 0 else None
        inputs = {"x": np.full((1, size), value, np.float32)}
        request = InferRequest("m", inputs, "1", priority=self._script.number(2), deadline=deadline)
        outcomes: list[Outcome] = []

        def submit(done: Done) -> Cancellable | None:
            match self._script.number(5):
                case 0:
                    raise Unavailable("the queue is full", "", 1)
                case 1:
                    done(_answer(value, size))
                    return None
            self.work.append(work := _Work(done, value))
            work.value = value + size / 10_000
            return work

        try:
            pending = self.model.answer(request, outcomes.append, submit)
        except Unavailable:
            assert not outcomes
            return
        self.asked.append((outcomes, value))
        self.pending += [pending] if pending is not None else []

    def finish(self, work: _Work) -> None:
        self.work.remove(work)
        value, size = float(int(work.value)), round(10_000 * (work.value % 1))
        match self._script.number(4):
            case 0:
                work.end(None if isinstance(work, _Lookup) else InvalidArgument("wrong"))
            case 1:
                work.end(None if isinstance(work, _Lookup) else Unavailable("full"))
            case _:
                work.end(None if isinstance(work, _Lookup) else _answer(value, size))

    def check(self) -> None:
        assert self.cache.size_bytes <= _MAX_BYTES
        assert self.cache.size_bytes == sum(answer.size_bytes for answer, _ in self.cache._entries.values())
        assert self.model.keys == set(self.cache._entries)
        assert 0 <= self.model._waiting <= _MAX_WAITING
        for outcomes, value in self.asked:
            assert len(outcomes) <= 1, "a request is answered twice"
            for outcome in outcomes:
                if isinstance(outcome, InferResponse):
                    assert (outcome.outputs["y"] == value).all(), "a request has the answer to another"


def _answer(value: float, size: int) -> InferResponse:
    return InferResponse("m", "1", {"y": np.full((1, size), value, np.float32)})


class ResponseCacheTarget(Target):
    """See ``Target``."""

    def __init__(self) -> None:
        self._loop = FastLoop()
        self.seeds: Sequence[Seed] = [
            tuple(bytes((n * step % 239,)) for n in range(start, start + 60))
            for start in range(4)
            for step in (1, 3, 11)
        ]
        assert freeze(_answer(1, 1)).size_bytes < _MAX_BYTES

    def run(self, data: bytes) -> None:
        self._loop.run_until_complete(self._run(Script(data[:600])))
        assert not self._loop.failures, self._loop.failures

    async def _run(self, script: Script) -> None:
        scene = _Scene(self._loop, script)
        while not script.is_over:
            match script.number(6):
                case 0 | 1:
                    scene.ask()
                case 2 | 3 if scene.work:
                    scene.finish(scene.work[script.number(len(scene.work))])
                case 4 if scene.pending:
                    scene.pending[script.number(min(256, len(scene.pending)))].cancel()
                case 5:
                    await self._pass(script.number(3))
            scene.check()
        for _ in range(1000):
            if not scene.work:
                break
            scene.finish(scene.work[0])
            await self._pass(0)
        await self._pass(5)
        scene.check()
        assert all(len(outcomes) == 1 for outcomes, _ in scene.asked), "a request is never answered"
        assert not scene.model._flights
        assert scene.model._waiting == 0
        scene.model.forget()
        assert scene.cache.size_bytes == 0

    async def _pass(self, seconds: float) -> None:
        waiting = self._loop.create_future()
        self._loop.call_later(seconds, waiting.set_result, None)
        await waiting

    def close(self) -> None:
        self._loop.close()
