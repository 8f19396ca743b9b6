"""Requests to ensembles of real and fake models, each with its own scheduler."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import models
from ensembles import Bench, Gate, chain, ensemble, parameter, step, tensor
from garbage import new_objects_only
from penstock.artifact import Artifact
from penstock.clock import SystemClock
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import Cancelled, Code, InvalidArgument, PenstockError
from penstock.online.cache.response_cache import ResponseCache
from penstock.online.repository.loading.assembly import RequestLimits
from penstock.request import Deadline
from penstock.telemetry.statistics import Failure
from penstock.tensor import Array, DataType, Signature, TensorSpec
from penstock.testing import FakeModel, double

ONES = {"X": np.ones((1, 2), np.float32)}


def onnx(artifact: Artifact) -> LoadedModel:
    return get_engine("onnxruntime").load(artifact, {"threads": 1})


def run(test: Any) -> None:
    asyncio.run(test())


def test_a_chain_of_onnx_models() -> None:
    async def test() -> None:
        async with Bench() as bench:
            bench.model("first", onnx(models.linear(2, 3)))
            bench.model("second", onnx(models.linear(3, 2, seed=1)))
            handle = bench.ensemble(ensemble(*chain("first", "second")))
            x = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
            answer = await bench.ask(inputs={"X": x}, id="7").response
            want = x @ models.linear_weight(2, 3) @ models.linear_weight(3, 2, seed=1)
            np.testing.assert_allclose(answer.outputs["Y"], want, rtol=1e-5)
            assert (answer.model_name, answer.model_version, answer.id) == ("e", "1", "7")
            counts = handle.statistics.to_dict()
            assert (counts["inference_count"], counts["execution_count"]) == (3, 1)
            assert counts["inference_stats"]["success"]["count"] == 1
            assert handle.statistics.pending == 0

    run(test)


DIAMOND = ensemble(
    step("double", {"x": "X"}, {"y": "a"}),
    step("relu", {"x": "X"}, {"y": "b"}),
    step("both", {"a": "a", "b": "b"}, {"sum": "S", "difference": "D"}),
    tensors=tensor("input", "X") + tensor("output", "S") + tensor("output", "D"),
)


def test_a_diamond_of_onnx_models_and_outputs_by_choice() -> None:
    async def test() -> None:
        async with Bench() as bench:
            bench.model("double", FakeModel())
            bench.model("relu", onnx(models.identity(DataType.FP32)))
            bench.model("both", onnx(models.sum_and_difference()))
            bench.ensemble(DIAMOND)
            assert await bench.outputs(inputs=ONES) == {"S": [[3, 3]], "D": [[1, 1]]}
            assert await bench.outputs(inputs=ONES, outputs=("D", "S")) == {"D": [[1, 1]], "S": [[3, 3]]}
            assert await bench.outputs(inputs=ONES, outputs=("D",)) == {"D": [[1, 1]]}

    run(test)


def test_text_and_numbers() -> None:
    def parse(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": np.array([[float(one) for one in row] for row in inputs["s"]], np.float32)}

    text = Signature((TensorSpec("s", DataType.BYTES, (-1, 2)),), (TensorSpec("y", DataType.FP32, (-1, 2)),))

    async def test() -> None:
        async with Bench() as bench:
            bench.model("parse", FakeModel(text, parse))
            bench.model("linear", onnx(models.identity(DataType.FP32)))
            config = ensemble(
                step("parse", {"s": "X"}, {"y": "t"}),
                step("linear", {"x": "t"}, {"y": "Y"}),
                tensors=tensor("input", "X", "STRING") + tensor("output", "Y"),
            )
            bench.ensemble(config)
            assert await bench.outputs(inputs={"X": np.array([[b"1", b"2.5"]], object)}) == {"Y": [[1, 2.5]]}

    run(test)


def test_ensembles_in_ensembles() -> None:
    async def test() -> None:
        async with Bench() as bench:
            bench.model("m", FakeModel())
            inner = bench.ensemble(ensemble(*chain("m", "m")), "inner")
            bench.ensemble(
                ensemble(*[text.replace('"x"', '"X"').replace('"y"', '"Y"') for text in chain("inner", "inner")])
            )
            assert await bench.outputs(inputs=ONES) == {"Y": [[16, 16]]}
            assert inner.statistics.execution_count == 2

    run(test)


def test_a_version_per_step() -> None:
    def times(factor: int) -> FakeModel:
        return FakeModel(forward=lambda inputs: {"y": inputs["x"] * factor})

    async def test() -> None:
        async with Bench() as bench:
            bench.model("m", times(3), "1")
            bench.model("m", times(5), "2")
            steps = [step("m", {"x": "X"}, {"y": "t"}, 1), step("m", {"x": "t"}, {"y": "Y"})]
            bench.ensemble(ensemble(*steps))
            assert await bench.outputs(inputs=ONES) == {"Y": [[15, 15]]}
            bench.model("m", times(7), "3")
            assert await bench.outputs(inputs=ONES) == {"Y": [[21, 21]]}, "the latest at that time"

    run(test)


def test_steps_of_different_requests_are_computed_together() -> None:
    async def test() -> None:
        gate = Gate()
        async with Bench() as bench:
            bench.model("first", onnx(models.identity(DataType.FP32)))
            second = bench.model("second", FakeModel(forward=gate))
            bench.ensemble(ensemble(*chain("first", "second")))
            one = bench.ask(inputs=ONES)
            await gate.entered()
            others = [bench.ask(inputs=ONES) for _ in range(3)]
            while second.statistics.pending < 4:
                await asyncio.sleep(0)
            gate.open(2)
            for asked in (one, *others):
                await asked.response
            assert gate.batches == [1, 3]
            assert (second.statistics.inference_count, second.statistics.execution_count) == (4, 2)

    run(test)


def test_requests_overlap_over_the_stages() -> None:
    async def test() -> None:
        first, second = Gate(), Gate()
        async with Bench() as bench:
            bench.model("first", FakeModel(forward=first))
            bench.model("second", FakeModel(forward=second))
            bench.ensemble(ensemble(*chain("first", "second")))
            one, two = bench.ask(inputs=ONES), None
            await first.entered()
            first.open()
            await second.entered()
            two = bench.ask(inputs=ONES)
            await first.entered()  # while the other is in the second stage
            assert not one.outcomes
            first.open()
            second.open(2)
            await one.response
            await two.response

    run(test)


def test_independent_steps_run_side_by_side() -> None:
    async def test() -> None:
        left, right = Gate(), Gate()
        async with Bench() as bench:
            bench.model("double", FakeModel(forward=left))
            bench.model("relu", FakeModel(forward=right))
            bench.model("both", onnx(models.sum_and_difference()))
            bench.ensemble(DIAMOND)
            asked = bench.ask(inputs=ONES)
            await left.entered()
            await right.entered()
            left.open()
            right.open()
            await asked.response

    run(test)


def test_tensors_are_handed_on_without_copies() -> None:
    async def test() -> None:
        given: list[Array] = []

        def keep(inputs: Mapping[str, Array]) -> dict[str, Array]:
            given.append(inputs["x"])
            return {"y": inputs["x"]}

        async with Bench() as bench:
            bench.model("m", FakeModel(forward=keep))
            bench.ensemble(ensemble(*chain("m", "m", "m")))
            x = np.ones((2, 2), np.float32)
            answer = await bench.ask(inputs={"X": x}).response
            assert all(np.shares_memory(x, array) for array in (*given, answer.outputs["Y"]))

    run(test)


def test_what_the_client_says_of_a_request_is_told_to_the_parts() -> None:
    async def test() -> None:
        async with Bench() as bench:
            part = bench.model("m", FakeModel())
            seen = []
            submit = part.scheduler.submit

            def watch(request: Any, *arguments: Any) -> Any:
                seen.append(request)
                return submit(request, *arguments)

            part.scheduler.submit = watch  # type: ignore[method-assign]
            bench.ensemble(ensemble(*chain("m", "m")))
            parameters = {"sequence_id": 7, "sequence_start": True, "priority": 2, "timeout": 10**7, "mine": "x"}
            await bench.outputs(inputs=ONES, id="9", parameters=parameters, client="team")
            for request in seen:
                assert (request.model_name, request.model_version, request.id) == ("m", "1", "9")
                assert (request.parameters, request.priority, request.client) == (parameters, 2, "team")
                assert request.deadline is not None
                assert request.deadline.at == seen[0].deadline.at, "the whole has one deadline"

    run(test)


def test_a_deadline_that_has_passed_is_told_by_the_part() -> None:
    async def test() -> None:
        async with Bench() as bench:
            part = bench.model("m", FakeModel())
            handle = bench.ensemble(ensemble(*chain("m")))
            error = await bench.ask(inputs=ONES, deadline=Deadline(SystemClock().now() - 1)).error
            assert error.code is Code.DEADLINE_EXCEEDED
            assert error.message.startswith("in ensemble 'e', step 'm': ")
            for one in (part, handle):
                assert one.statistics.failures[Failure.REJECTED] == 1

    run(test)


def test_an_error_of_a_part_says_where_it_happened() -> None:
    def fail(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise PenstockError("out of order", "mend it")

    async def test() -> None:
        async with Bench() as bench:
            bench.model("good", FakeModel())
            bench.model("bad", FakeModel(forward=fail))
            inner = chain("good", "bad")
            bench.ensemble(ensemble(*inner), "inner")
            outer = bench.ensemble(ensemble(step("inner", {"X": "X"}, {"Y": "Y"})))
            error = await bench.ask(inputs=ONES).error
            assert (error.code, error.hint) == (Code.INTERNAL, "mend it")
            assert error.message == "in ensemble 'e', step 'inner': in ensemble 'inner', step 'bad': out of order"
            assert outer.statistics.failures[Failure.BACKEND] == 1
            assert outer.statistics.pending == 0

    run(test)


def test_what_the_first_step_refuses_is_refused() -> None:
    async def test() -> None:
        async with Bench() as bench:
            bench.model("m", FakeModel())
            bench.ensemble(ensemble(*chain("m")))
            error = await bench.ask(inputs={"X": np.ones((1, 3), np.float32)}).error
            assert isinstance(error, InvalidArgument)
            assert "unexpected shape for input 'X' for model 'e'" in error.message
            assert isinstance(await bench.ask(inputs=ONES, outputs=("Z",)).error, InvalidArgument)

    run(test)


def test_a_cancelled_request_leaves_the_parts() -> None:
    async def test() -> None:
        gate = Gate()
        async with Bench() as bench:
            part = bench.model("m", FakeModel(forward=gate))
            handle = bench.ensemble(ensemble(*chain("m", "m")))
            first, second = bench.ask(inputs=ONES), bench.ask(inputs=ONES)
            await gate.entered()
            third = bench.ask(inputs=ONES)
            for asked in (second, third, first):
                asked.cancel()
                asked.cancel()
                assert isinstance(await asked.error, Cancelled)
            assert handle.statistics.failures[Failure.CANCELED] == 3
            assert part.statistics.pending == 0
            gate.open()

    run(test)


def test_a_part_that_is_unloaded_serves_the_requests_under_way() -> None:
    async def test() -> None:
        gate = Gate()
        async with Bench() as bench:
            bench.model("first", FakeModel(forward=gate))
            second = bench.model("second", FakeModel())
            bench.ensemble(ensemble(*chain("first", "second")), "inner")
            handle = bench.ensemble(ensemble(step("inner", {"X": "X"}, {"Y": "Y"})))
            asked = bench.ask(inputs=ONES)
            await gate.entered()
            bench.served.remove("second", "1")
            bench.handles.remove(second)
            unloading = asyncio.ensure_future(second.unload())
            error = await bench.ask(inputs=ONES).error
            assert error.code is Code.UNAVAILABLE
            assert error.message == "in ensemble 'e', Request for unknown model: 'second' is not found"
            assert not handle.is_healthy
            assert not unloading.done()
            gate.open()
            assert (await asked.response).outputs["Y"].tolist() == [[4, 4]]
            await unloading

    run(test)


def test_a_part_that_is_replaced_answers_what_began_before() -> None:
    async def test() -> None:
        gate = Gate()
        async with Bench() as bench:
            bench.model("first", FakeModel(forward=gate))
            old = bench.model("second", FakeModel())
            bench.ensemble(ensemble(*chain("first", "second")))
            asked = bench.ask(inputs=ONES)
            await gate.entered()
            bench.served.remove("second", "1")
            bench.model("second", FakeModel(forward=lambda inputs: {"y": inputs["x"] * 100}))
            gate.open(2)
            assert (await asked.response).outputs["Y"].tolist() == [[4, 4]]
            assert await bench.outputs(inputs=ONES) == {"Y": [[200, 200]]}
            assert old.statistics.execution_count == 1

    run(test)


def test_no_more_requests_than_allowed_are_inside() -> None:
    async def test() -> None:
        gate = Gate()
        async with Bench(limits=RequestLimits(max_queue=4)) as bench:
            part = bench.model("m", FakeModel(forward=gate))
            handle = bench.ensemble(ensemble(*chain("m"), inside=2))
            asked = [bench.ask(inputs=ONES) for _ in range(4)]
            await gate.entered()
            assert part.statistics.pending == 2
            error = await bench.ask(inputs=ONES).error
            assert (error.code, error.message) == (Code.UNAVAILABLE, "the queue of model 'e' is full")
            asked[3].cancel()
            assert isinstance(await asked[3].error, Cancelled)
            gate.open(3)
            for one in asked[:3]:
                await one.response
            assert gate.batches == [2, 1]
            assert handle.statistics.queue_ns > 0

    run(test)


def test_a_deadline_that_passes_outside_is_told_at_once() -> None:
    async def test() -> None:
        gate = Gate()
        async with Bench() as bench:
            bench.model("m", FakeModel(forward=gate))
            handle = bench.ensemble(ensemble(*chain("m"), inside=1))
            inside = bench.ask(inputs=ONES)
            await gate.entered()
            outside = bench.ask(inputs=ONES, deadline=Deadline.after(0.01, SystemClock()))
            assert (await outside.error).code is Code.DEADLINE_EXCEEDED
            assert handle.statistics.failures[Failure.REJECTED] == 1
            gate.open()
            await inside.response
            assert handle.statistics.pending == 0

    run(test)


class Away(PenstockError):
    code = Code.UNAVAILABLE


def test_an_error_of_a_part_keeps_its_code() -> None:
    def fail(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise Away("restarting", retry_after_s=2)

    async def test() -> None:
        async with Bench() as bench:
            bench.model("m", FakeModel(forward=fail))
            bench.ensemble(ensemble(*chain("m")))
            error = await bench.ask(inputs=ONES).error
            assert (error.code, error.retry_after_s) == (Code.UNAVAILABLE, 2)

    run(test)


def test_an_ensemble_that_is_unloaded_answers_first() -> None:
    async def test() -> None:
        gate = Gate()
        async with Bench() as bench:
            bench.model("m", FakeModel(forward=gate))
            handle = bench.ensemble(ensemble(*chain("m")))
            asked = bench.ask(inputs=ONES)
            await gate.entered()
            unloading = asyncio.ensure_future(handle.unload())
            gate.open()
            await asked.response
            await unloading
            error = await bench.ask(inputs=ONES).error
            assert error.message == "model 'e' is being unloaded"

    run(test)


CACHED = "response_cache { enable: true }"


def test_answers_are_kept_for_as_long_as_the_parts_are_the_same() -> None:
    async def test() -> None:
        cache = ResponseCache(1 << 20, SystemClock())
        async with Bench(cache) as bench:
            part = bench.model("m", FakeModel())
            part.identity = "one"
            handle = bench.ensemble(ensemble(*chain("m", "m"), more=CACHED))
            for _ in range(3):
                assert await bench.outputs(inputs=ONES) == {"Y": [[4, 4]]}
            assert (handle.statistics.hits.count, part.statistics.execution_count) == (2, 2)
            bench.served.remove("m", "1")
            error = await bench.ask(inputs=ONES).error
            assert error.code is Code.UNAVAILABLE, "what is kept is not given for a part that is not there"
            changed = bench.model("m", FakeModel(forward=lambda inputs: {"y": inputs["x"] * 3}))
            changed.identity = "another"
            assert await bench.outputs(inputs=ONES) == {"Y": [[9, 9]]}

    run(test)


def test_a_part_that_keeps_its_answers_is_not_run() -> None:
    async def test() -> None:
        cache = ResponseCache(1 << 20, SystemClock())
        async with Bench(cache) as bench:
            part = bench.model("m", FakeModel())
            part.cache = cache.of("m", "1", part.statistics, 9)
            bench.ensemble(ensemble(*chain("m", "m", "m")))
            for _ in range(2):
                assert await bench.outputs(inputs=ONES) == {"Y": [[8, 8]]}
            assert (part.statistics.hits.count, part.statistics.execution_count) == (3, 3)

    run(test)


def test_a_condition_decides_which_step_runs() -> None:
    flag = tensor("input", "X") + tensor("input", "FLAG", "INT32", "1") + tensor("output", "Y")
    steps = [step("twice", {"x": "X"}, {"y": "Y"}), step("same", {"x": "X"}, {"y": "Y"})]
    conditions = parameter("if.twice", "FLAG > 1") + parameter("if.1", "FLAG <= 1")

    async def test() -> None:
        async with Bench() as bench:
            twice = bench.model("twice", FakeModel())
            same = bench.model("same", onnx(models.identity(DataType.FP32)))
            bench.ensemble(ensemble(*steps, tensors=flag, more=conditions))
            assert await bench.outputs(inputs=ONES | {"FLAG": np.array([[5]], np.int32)}) == {"Y": [[2, 2]]}
            assert await bench.outputs(inputs=ONES | {"FLAG": np.array([[0]], np.int32)}) == {"Y": [[1, 1]]}
            assert (twice.statistics.execution_count, same.statistics.execution_count) == (1, 1)
            rows = {"X": np.ones((2, 2), np.float32), "FLAG": np.array([[0], [5]], np.int32)}
            error = await bench.ask(inputs=rows).error
            assert error.message.startswith(
                "in ensemble 'e', step 'twice': the condition 'FLAG > 1' holds for some rows"
            )

    run(test)


@pytest.mark.parametrize("optional", [False, True])
def test_an_output_that_nothing_gave(optional: bool) -> None:
    tensors = (
        tensor("input", "X") + tensor("input", "FLAG", "BOOL", "1") + tensor("output", "Y") + tensor("output", "Z")
    )
    steps = [step("m", {"x": "X"}, {"y": "Y"}), step("m", {"x": "X"}, {"y": "Z"})]
    more = parameter("if.1", "FLAG") + (parameter("optional_outputs", "Z") if optional else "")

    async def test() -> None:
        async with Bench() as bench:
            bench.model("m", FakeModel())
            bench.ensemble(ensemble(*steps, tensors=tensors, more=more))
            asked = bench.ask(inputs=ONES | {"FLAG": np.array([[False]])})
            if optional:
                assert list((await asked.response).outputs) == ["Y"]
            else:
                assert (await asked.error).message == "in ensemble 'e', output 'Z' is missing: step 'm[1]' was skipped"

    run(test)


def test_batches_of_one_and_tensors_without_batch_dimension() -> None:
    async def test() -> None:
        pair = Signature((TensorSpec("x", DataType.FP32, (2,)),), (TensorSpec("y", DataType.FP32, (2,)),))
        async with Bench() as bench:
            bench.model("rows", FakeModel())
            bench.model("alone", FakeModel(pair, double), max_batch=None)
            bench.ensemble(ensemble(*chain("rows", "alone", "rows")))
            assert await bench.outputs(inputs=ONES) == {"Y": [[8, 8]]}
            error = await bench.ask(inputs={"X": np.ones((2, 2), np.float32)}).error
            assert "unexpected shape for input 'x' for model 'alone'" in error.message
            bench.ensemble(ensemble(*chain("rows", "alone"), batch=0), "unbatched")
            assert await bench.outputs("unbatched", {"X": np.ones(2, np.float32)}) == {"Y": [4, 4]}

    run(test)


def test_a_reshape_is_between_the_clients_and_the_parts() -> None:
    tensors = tensor("input", "X", dims="1, 2", more="reshape { shape: [2] }")
    tensors += tensor("output", "Y", dims="2, 1", more="reshape { shape: [2] }")

    async def test() -> None:
        async with Bench() as bench:
            bench.model("m", FakeModel())
            bench.ensemble(ensemble(*chain("m"), tensors=tensors))
            assert await bench.outputs(inputs={"X": np.ones((3, 1, 2), np.float32)}) == {"Y": [[[2], [2]]] * 3}

    run(test)


def test_requests_leave_no_cycles_behind() -> None:
    async def test() -> None:
        async with Bench() as bench:
            bench.model("m", FakeModel())
            handle = bench.ensemble(ensemble(*chain("m", "m")))
            await bench.outputs(inputs=ONES)
            with new_objects_only():
                for _ in range(50):
                    await bench.outputs(inputs=ONES)
                assert gc.collect() < 50
            assert handle.statistics.execution_count == 51

    run(test)
