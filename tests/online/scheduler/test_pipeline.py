"""Requests to pipelines whose models have schedulers of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines
from ensembles import Bench, Gate
from handles import make_handle
from penstock.clock import SystemClock
from penstock.errors import Cancelled, Code, PenstockError
from penstock.online.repository.handle import Handle
from penstock.online.repository.loading.assembly import RequestLimits
from penstock.online.repository.loading.pipeline import LoadedPipeline
from penstock.online.repository.model_source import ModelSource
from penstock.pipeline.function import Function
from penstock.pipeline.steps.base import Step
from penstock.pipeline.value import Value
from penstock.request import Deadline
from penstock.resources import usable_cores
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel
from random_functions import MODEL, Plain, Wiring, expected, finished, forward, function_of, functions, number

SPECS = Signature((TensorSpec("x", DataType.INT64, (-1, 1)),), (TensorSpec("y", DataType.INT64, (-1, 1)),))


class PipelineBench(Bench):
    """A bench that serves pipelines over the model of ``random_functions``."""

    def pipeline(self, function: Function, run: Any = forward, name: str = "p") -> Handle:
        source = ModelSource(name, Path(), {"1": Path()})
        part = make_handle(FakeModel(SPECS, forward=run), f"{name}/model", max_batch=4)
        loaded = LoadedPipeline(source, "1", function, {}, "digest")
        return self._serve(self.assembler.join(loaded, {"model": part}))


def run(test: Any) -> None:
    asyncio.run(test())
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-worker")]


@settings(max_examples=40, deadline=None)
@given(functions(), st.lists(st.integers(0, 999), min_size=1, max_size=8))
def test_each_request_gets_the_result_of_the_function(function: Function, values: list[int]) -> None:
    async def test() -> None:
        async with PipelineBench() as bench:
            handle = bench.pipeline(function)
            asked = [bench.ask("p", {"x": number(value)}) for value in values]
            for value, one in zip(values, asked, strict=True):
                should = expected(function, number(value))
                if should is None:
                    error = await one.error
                    assert error.code is Code.INVALID_ARGUMENT
                    assert error.message.startswith("in pipeline 'p', step 's")
                else:
                    outputs = (await one.response).outputs
                    assert {name: array.tolist() for name, array in outputs.items()} == {
                        name: [number] for name, number in should.items()
                    }
            assert handle.statistics.pending == 0

    run(test)


@settings(max_examples=40, deadline=None)
@given(functions(), st.integers(0, 999), st.data())
def test_only_the_steps_of_the_requested_outputs_run(function: Function, value: int, data: st.DataObject) -> None:
    outputs = tuple(data.draw(st.lists(st.sampled_from(function.graph.outputs), min_size=1, unique=True)))
    should = expected(function, number(value), outputs)

    async def test() -> None:
        async with PipelineBench() as bench:
            bench.pipeline(function)
            asked = bench.ask("p", {"x": number(value)}, outputs=outputs)
            if should is None:
                await asked.error
                return
            found = (await asked.response).outputs
            assert {name: int(array[0]) for name, array in found.items()} == should

    run(test)


def test_a_step_that_no_requested_output_needs_does_not_run() -> None:
    async def test() -> None:
        calls: list[int] = []

        def counted(inputs: Mapping[str, Value]) -> dict[str, Value]:
            calls.append(len(inputs["x"]))
            return forward(inputs)

        wiring = Wiring()
        plain, model = wiring.add(Plain(salt=1), ["x"]), wiring.add(MODEL, ["x"], ["x"])
        async with PipelineBench() as bench:
            bench.pipeline(finished(wiring, {plain: "y", model: "z"}), counted)
            # The model rejects 13, but y does not need it.
            response = await bench.ask("p", {"x": number(13)}, outputs=("y",)).response
            assert (list(response.outputs), int(response.outputs["y"][0]), calls) == (["y"], 14, [])
            response = await bench.ask("p", {"x": number(2)}, outputs=("z", "y")).response
            assert (list(response.outputs), calls) == (["z", "y"], [1])
            error = await bench.ask("p", {"x": number(2)}, outputs=("w",)).error
            assert error.code is Code.INVALID_ARGUMENT

    run(test)


def test_model_steps_of_different_requests_run_as_one_batch() -> None:
    async def test() -> None:
        gate = Gate()

        def held(inputs: Mapping[str, Value]) -> dict[str, Value]:
            gate(inputs)
            return {"y": inputs["x"] + 1}

        async with PipelineBench() as bench:
            handle = bench.pipeline(function_of(Wiring(), Plain(salt=1), MODEL), held)
            first = bench.ask("p", {"x": number(0)})
            await gate.entered()
            more = [bench.ask("p", {"x": number(value)}) for value in range(1, 5)]
            part = handle.all_statistics[1]
            while part.pending < 5:
                await asyncio.sleep(0)
            gate.open(2)
            answers = [await one.response for one in (first, *more)]
            assert [int(one.outputs["y"][0]) for one in answers] == [2, 3, 4, 5, 6]
            assert gate.batches == [1, 4]
            assert part.name == "p/model"

    run(test)


def test_a_cancelled_request_leaves_the_queue_of_its_model() -> None:
    async def test() -> None:
        gate = Gate()
        async with PipelineBench() as bench:
            handle = bench.pipeline(function_of(Wiring(), MODEL), lambda inputs: {"y": gate(inputs) and inputs["x"]})
            first = bench.ask("p", {"x": number(0)})
            await gate.entered()
            second, part = bench.ask("p", {"x": number(1)}), handle.all_statistics[1]
            while part.pending < 2:
                await asyncio.sleep(0)
            second.cancel()
            assert isinstance(await second.error, Cancelled)
            while part.pending > 1:
                await asyncio.sleep(0)
            gate.open(1)
            await first.response
            assert gate.batches == [1]

    run(test)


def test_a_request_that_waits_may_be_cancelled_or_expire() -> None:
    async def test() -> None:
        gate = Gate()
        async with PipelineBench(limits=RequestLimits(max_queue=200)) as bench:
            handle = bench.pipeline(function_of(Wiring(), MODEL), lambda inputs: {"y": gate(inputs) and inputs["x"]})
            inside = [bench.ask("p", {"x": number(0)}) for _ in range(60)]
            await gate.entered()
            late = bench.ask("p", {"x": number(1)}, deadline=Deadline.after(0.01, SystemClock()))
            waiting = bench.ask("p", {"x": number(2)})
            waiting.cancel()
            assert isinstance(await waiting.error, Cancelled)
            assert (await late.error).code is Code.DEADLINE_EXCEEDED
            gate.open(60)
            for one in inside:
                await one.response
            assert handle.statistics.pending == 0

    run(test)


def test_a_full_queue_refuses_further_requests() -> None:
    async def test() -> None:
        gate = Gate()
        async with PipelineBench(limits=RequestLimits(max_queue=2)) as bench:
            bench.pipeline(function_of(Wiring(), MODEL), lambda inputs: {"y": gate(inputs) and inputs["x"]})
            asked = [bench.ask("p", {"x": number(0)}) for _ in range(2)]
            error = await bench.ask("p", {"x": number(0)}).error
            assert (error.code, error.message) == (Code.UNAVAILABLE, "the queue of model 'p' is full")
            gate.open(2)
            for one in asked:
                await one.response

    run(test)


def test_wrong_tensors_are_refused() -> None:
    async def test() -> None:
        async with PipelineBench() as bench:
            bench.pipeline(function_of(Wiring(), Plain(salt=0)))
            error: PenstockError = await bench.ask("p", {"x": np.zeros(3, np.int64)}).error
            assert "unexpected shape for input 'x'" in error.message

    run(test)


class Leaves(Plain, frozen=True, kw_only=True):
    """Ends its thread, as a panic of a library in Rust does, if the number is odd."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        if inputs["x0"][0] % 2:
            raise SystemExit
        return {"y": inputs["x0"]}

    def run_many(self, items: Sequence[Mapping[str, Value]]) -> list[dict[str, Value]]:
        return [self.run(item) for item in items]


class Unsendable(Plain, frozen=True, kw_only=True):
    """Returns what is no tensor."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        return {"y": [[1], [1, 2]]}


def test_a_request_is_answered_even_if_its_step_ends_the_thread() -> None:
    async def test() -> None:
        async with PipelineBench() as bench:
            handle = bench.pipeline(function_of(Wiring(), Leaves(salt=1)))
            asked = [bench.ask("p", {"x": number(value)}) for value in range(8 * usable_cores())]
            for value, one in enumerate(asked):
                if value % 2:
                    error = await asyncio.wait_for(one.error, 10)
                    assert error.message == "in pipeline 'p', step 's0': internal error"
                else:
                    assert (await asyncio.wait_for(one.response, 10)).outputs["y"].tolist() == [value]
            assert handle.statistics.pending == 0

    run(test)


def test_a_request_is_answered_even_if_its_outputs_cannot_be_sent() -> None:
    async def test() -> None:
        async with PipelineBench() as bench:
            handle = bench.pipeline(function_of(Wiring(), Unsendable(salt=1)))
            for _ in range(8 * usable_cores()):
                error = await asyncio.wait_for(bench.ask("p", {"x": number(1)}).error, 10)
                assert error.message == "in pipeline 'p', internal error"
            assert handle.statistics.pending == 0

    run(test)


class Ordered(Plain, frozen=True, kw_only=True):
    """Records the numbers that it sees. Waits at 0 until ``go`` is set."""

    run_many = Step.run_many  # one call at a time

    seen: list[int] = []
    held: Any = None
    go: Any = None

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        self.seen.append(int(inputs["x0"][0]))
        if not self.seen[-1]:
            self.held.release()
            assert self.go.wait(30)
        return {"y": inputs["x0"]}


@pytest.mark.parametrize("flood", [6, 400])
def test_a_request_of_another_client_passes_a_flood(flood: int) -> None:
    async def test() -> None:
        step = Ordered(salt=1, seen=[], held=threading.Semaphore(0), go=threading.Event())
        cores = usable_cores()
        async with PipelineBench() as bench:
            bench.pipeline(function_of(Wiring(), step))
            asked = [bench.ask("p", {"x": number(0)}, origin=1) for _ in range(cores)]
            for _ in range(cores):
                assert await asyncio.to_thread(step.held.acquire, timeout=30)
            asked += [bench.ask("p", {"x": number(1)}, origin=1) for _ in range(flood)]
            await asyncio.sleep(0)
            asked += [bench.ask("p", {"x": number(2)}, origin=2) for _ in range(3)]
            await asyncio.sleep(0)
            step.go.set()
            for one in asked:
                await one.response
        place = max(place for place, one in enumerate(step.seen) if one == 2)
        inside = 2 * (cores + 4)
        assert step.seen[cores:place].count(1) <= (cores if flood < inside else inside)

    run(test)


def test_a_request_is_answered_at_its_deadline_although_its_step_still_runs() -> None:
    async def test() -> None:
        step = Ordered(salt=1, seen=[], held=threading.Semaphore(0), go=threading.Event())
        async with PipelineBench() as bench:
            handle = bench.pipeline(function_of(Wiring(), step))
            late = bench.ask("p", {"x": number(0)}, deadline=Deadline.after(0.01, SystemClock()))
            error = await late.error
            assert (error.code, error.message) == (
                Code.DEADLINE_EXCEEDED,
                "in pipeline 'p', the request's deadline passed while it ran",
            )
            assert handle.statistics.pending == 0
            step.go.set()

    run(test)


class Text(bytes):
    """A text that records the threads that decode it and encode its result. Waits until ``go`` is set, if it has one."""

    threads: list[int]
    go: threading.Event | None = None

    def decode(self, *_: Any) -> str:  # type: ignore[override]
        self.threads.append(threading.get_ident())
        if self.go is not None:
            assert self.go.wait(30)
        found = Decoded(super().decode())
        found.threads = self.threads
        return found


class Decoded(str):
    __slots__ = ("threads",)
    threads: list[int]

    def encode(self, *_: Any) -> bytes:  # type: ignore[override]
        self.threads.append(threading.get_ident())
        return super().encode()


def text_of(size: int, go: threading.Event | None = None) -> tuple[Text, dict[str, Any]]:
    text = Text(b"x" * size)
    text.threads, text.go = [], go
    array = np.empty(1, object)
    array[0] = text
    return text, {"text": array, "features": np.zeros(2, np.float32)}


def test_large_texts_are_converted_on_other_threads() -> None:
    async def test() -> None:
        async with PipelineBench() as bench:
            bench.pipeline(pipelines.function(pipelines.TEXT_AND_FEATURES))
            for size, is_here in ((60_000, True), (70_000, False)):
                text, inputs = text_of(size)
                response = await bench.ask("p", inputs).response
                assert response.outputs["text"].tolist() == [text]
                assert [one == threading.get_ident() for one in text.threads] == [is_here] * 2

    run(test)


def test_a_request_may_be_cancelled_while_its_text_is_converted() -> None:
    async def test() -> None:
        async with PipelineBench() as bench:
            handle = bench.pipeline(pipelines.function(pipelines.TEXT_AND_FEATURES))
            text, inputs = text_of(70_000, threading.Event())
            asked = bench.ask("p", inputs)
            while not text.threads:
                await asyncio.sleep(0)
            asked.cancel()
            assert isinstance(await asked.error, Cancelled)
            assert text.go is not None
            text.go.set()
            _, inputs = text_of(70_000)
            await bench.ask("p", inputs).response
            assert (len(text.threads), len(asked.outcomes), handle.statistics.pending) == (1, 1, 0)

    run(test)
