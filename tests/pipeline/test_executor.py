"""Runs of graphs: results, release of tensors, and ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Cancelled, Code, InvalidArgument, PenstockError, Unavailable
from penstock.pipeline.condition import Condition
from penstock.pipeline.executor import PipelineRun, Told, Work
from penstock.pipeline.graph import Graph, PipelineStep, declare
from penstock.tensor import Array, DataType, Signature, TensorSpec


class Job(msgspec.Struct, eq=False):
    """A running step."""

    step: PipelineStep
    inputs: dict[str, Array]
    done: Callable[[Told], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def finish(self) -> None:
        """Complete the step with its outputs, and remove it."""
        done, outputs = self.done, compute(self.step, self.inputs)
        self.inputs = {}
        done(outputs)


def compute(step: PipelineStep, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """A different array for every output, which depends on all inputs and their names."""
    total = sum(array * (len(own) + int(own[1:])) for own, array in inputs.items())
    return {own: np.asarray(total + int(own[1:]) + 1) for own in step.outputs}


def spec(name: str) -> TensorSpec:
    return TensorSpec(name, DataType.INT64, (1,))


def make(inputs: list[str], outputs: list[str], *steps: PipelineStep, **more: Any) -> Graph:
    return declare(Signature(tuple(map(spec, inputs)), tuple(map(spec, outputs))), steps, **more)


def step(name: str, reads: list[str], gives: list[str], condition: str = "", **more: Any) -> PipelineStep:
    return PipelineStep(
        name,
        {f"i{n}": tensor for n, tensor in enumerate(reads)},
        {f"o{n}": tensor for n, tensor in enumerate(gives)},
        Condition.parse(condition) if condition else None,
        **more,
    )


class Bench:
    """Runs a graph; ``jobs`` are the running steps, ``told`` the arguments of ``done``."""

    def __init__(self, graph: Graph, wanted: list[str] | None = None) -> None:
        self.plan = graph.plan(graph.outputs if wanted is None else wanted)
        self.jobs: list[Job] = []
        self.all: list[Job] = []
        self.told: list[Told] = []
        self.refuse: dict[str, Exception] = {}
        self.alive: dict[int, tuple[frozenset[str], weakref.ref[Array]]] = {}
        self.run = PipelineRun(self.plan, self.start, self.told.append)

    def start(self, one: PipelineStep, inputs: dict[str, Array], done: Callable[[Told], None]) -> Work:
        if one.name in self.refuse:
            raise self.refuse[one.name]
        job = Job(one, inputs, done)
        self.jobs.append(job)
        self.all.append(job)
        return job

    def begin(self, **inputs: int) -> Bench:
        self.run.begin({name: np.array([value]) for name, value in inputs.items()})
        return self

    def finish(self, name: str) -> None:
        job = next(job for job in self.jobs if job.step.name == name)
        self.jobs.remove(job)
        job.finish()

    @property
    def names(self) -> list[str]:
        return [job.step.name for job in self.jobs]

    @property
    def values(self) -> dict[str, int]:
        (told,) = self.told
        assert isinstance(told, dict), told
        return {name: int(array[0]) for name, array in told.items()}

    @property
    def error(self) -> PenstockError:
        (told,) = self.told
        assert isinstance(told, PenstockError)
        return told


DIAMOND = make(
    ["x"],
    ["y"],
    step("top", ["x"], ["a"]),
    step("left", ["a"], ["b"]),
    step("right", ["a"], ["c"]),
    step("end", ["b", "c"], ["y"]),
)


def test_steps_start_as_soon_as_their_inputs_are_there() -> None:
    bench = Bench(DIAMOND).begin(x=1)
    assert bench.names == ["top"]
    bench.finish("top")
    assert bench.names == ["left", "right"], "side by side"
    bench.finish("right")
    assert bench.names == ["left"]
    bench.finish("left")
    bench.finish("end")
    assert bench.values == {"y": compute(step("", [], ["y"]), {"i0": np.array([7]), "i1": np.array([7])})["o0"][0]}


def test_tensors_are_handed_over_and_not_copied() -> None:
    bench = Bench(DIAMOND)
    x, b = np.array([1]), np.array([5])
    bench.run.begin({"x": x})
    assert bench.jobs[0].inputs["i0"] is x
    bench.finish("top")
    assert bench.jobs[0].inputs["i0"] is bench.jobs[1].inputs["i0"]
    bench.jobs[0].done({"o0": b})
    bench.jobs[1].done({"o0": b})
    assert bench.jobs[2].inputs["i0"] is b


def test_the_first_error_ends_the_run_and_cancels_the_others() -> None:
    bench = Bench(DIAMOND).begin(x=1)
    bench.finish("top")
    left, right = bench.jobs
    error = Unavailable("full", "try again", 3)
    left.done(error)
    assert (bench.error.code, bench.error.message) == (Code.UNAVAILABLE, "step 'left': full")
    assert (bench.error.hint, bench.error.retry_after_s) == ("try again", 3)
    assert (left.cancelled, right.cancelled) == (False, True)
    right.finish()
    left.done(error)
    assert len(bench.told) == 1


@pytest.mark.parametrize(
    ("raised", "message"), [(InvalidArgument("bad"), "step 'top': bad"), (TypeError("a bug"), "internal error")]
)
def test_a_step_that_cannot_be_started_ends_the_run(raised: Exception, message: str) -> None:
    bench = Bench(DIAMOND)
    bench.refuse["top"] = raised
    assert bench.begin(x=1).error.message == message


def test_a_step_that_does_not_give_what_it_declares_ends_the_run() -> None:
    bench = Bench(DIAMOND).begin(x=1)
    bench.jobs[0].done({})
    assert bench.error.message == "step 'top' returned no output 'o0'"


def test_a_run_that_is_cancelled_cancels_its_steps() -> None:
    bench = Bench(DIAMOND).begin(x=1)
    bench.run.cancel()
    bench.run.cancel()
    assert isinstance(bench.error, Cancelled)
    assert bench.jobs[0].cancelled


def test_a_step_that_was_being_started_when_the_run_ended_is_cancelled() -> None:
    jobs: list[Job] = []

    def start(one: PipelineStep, inputs: dict[str, Array], done: Callable[[Told], None]) -> Work:
        jobs.append(Job(one, inputs, done))
        run.cancel()
        return jobs[-1]

    told: list[Told] = []
    run = PipelineRun(DIAMOND.plan(["y"]), start, told.append)
    run.begin({"x": np.array([1])})
    assert jobs[0].cancelled
    assert len(told) == 1


def test_many_steps_that_are_done_at_once_are_no_recursion() -> None:
    chain = [step(str(n), [f"t{n}"], [f"t{n + 1}"]) for n in range(3000)]
    told: list[Told] = []
    run = PipelineRun(
        make(["t0"], ["t3000"], *chain).plan(["t3000"]),
        lambda one, inputs, done: done(compute(one, inputs)),
        told.append,
    )
    run.begin({"t0": np.array([0])})
    assert len(told) == 1


def test_steps_that_nothing_wanted_depends_on_are_not_run() -> None:
    graph = make(["x"], ["y", "z"], step("a", ["x"], ["y"]), step("b", ["x"], ["z"]))
    bench = Bench(graph, ["z"]).begin(x=1)
    assert bench.names == ["b"]
    bench.finish("b")
    assert list(bench.values) == ["z"]


EITHER = make(
    ["x", "flag"],
    ["y"],
    step("yes", ["x"], ["a"], "flag"),
    step("no", ["x"], ["a"], "not flag"),
    step("end", ["a"], ["y"]),
)


@pytest.mark.parametrize(("flag", "ran"), [(1, "yes"), (0, "no")])
def test_of_two_steps_that_exclude_one_another_one_gives_the_tensor(flag: int, ran: str) -> None:
    bench = Bench(EITHER).begin(x=1, flag=flag)
    assert bench.names == [ran]
    bench.finish(ran)
    bench.finish("end")
    assert list(bench.values) == ["y"]


def test_a_tensor_is_absent_when_all_who_could_give_it_were_skipped() -> None:
    graph = make(
        ["x", "n"],
        ["y"],
        step("one", ["x"], ["a"], "n == 1"),
        step("two", ["x"], ["a"], "n == 2"),
        step("end", ["a"], ["y"]),
    )
    bench = Bench(graph).begin(x=1, n=3)
    assert not bench.names
    assert bench.error.message == "output 'y' is missing: step 'end' was skipped"


def test_an_optional_output_may_be_missing() -> None:
    graph = make(
        ["x"],
        ["y", "z"],
        step("always", ["x"], ["y"]),
        step("sometimes", ["x"], ["z"], "x > 5"),
        optional=frozenset("z"),
    )
    bench = Bench(graph).begin(x=1)
    bench.finish("always")
    assert list(bench.values) == ["y"]


def test_a_step_does_without_its_optional_inputs_only() -> None:
    graph = make(["x", "u"], ["y"], step("s", ["x", "u"], ["y"], optional=frozenset({"i1"})))
    bench = Bench(graph).begin(x=1)
    assert list(bench.jobs[0].inputs) == ["i0"]
    assert Bench(graph).begin(u=1).error.message == "output 'y' is missing: step 's' was skipped"


def test_a_condition_that_cannot_be_decided_ends_the_run() -> None:
    bench = Bench(EITHER)
    bench.run.begin({"x": np.array([1]), "flag": np.array([0, 1])})
    assert bench.error.message.startswith("step 'yes': the condition 'flag != 0' holds for some rows")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    inputs = [f"x{n}" for n in range(draw(st.integers(1, 3)))]
    tensors, steps = list(inputs), []
    for number in range(draw(st.integers(1, 8))):
        reads = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3))
        gives = [f"t{number}.{n}" for n in range(draw(st.integers(1, 2)))]
        condition = draw(st.sampled_from(["", "", "{} > 9", "not {}", "{} <= 12"])).format(
            draw(st.sampled_from(tensors))
        )
        steps.append(step(f"s{number}", reads, gives, condition))
        tensors += gives
    outputs = draw(st.lists(st.sampled_from(tensors), min_size=1, unique=True))
    return make(inputs, outputs, *draw(st.permutations(steps)), optional=frozenset(outputs))


def evaluate(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, int]:
    """The graph's outputs, computed step by step."""
    values = dict(inputs)
    for one in graph.steps:
        if not one.reads <= values.keys() or (one.condition and not one.condition.holds(values[one.condition.tensor])):
            continue
        given = compute(one, {own: values[tensor] for own, tensor in one.inputs.items()})
        values |= {one.outputs[own]: array for own, array in given.items()}
    return {name: int(values[name][0]) for name in graph.outputs if name in values}


@settings(deadline=None, max_examples=300)
@given(graphs(), st.data())
def test_a_run_computes_what_the_steps_one_after_the_other_would(graph: Graph, data: st.DataObject) -> None:
    inputs = {name: data.draw(st.integers(0, 3)) for name in graph.inputs}
    bench = Bench(graph).begin(**inputs)
    while bench.jobs:
        bench.finish(data.draw(st.sampled_from(bench.names)))
    assert bench.values == evaluate(graph, {name: np.array([value]) for name, value in inputs.items()})


@settings(deadline=None, max_examples=300)
@given(graphs(), st.data())
def test_a_tensor_is_let_go_of_when_its_last_reader_has_started(graph: Graph, data: st.DataObject) -> None:
    bench = Bench(graph)
    alive: dict[str, weakref.ref[Array]] = {}

    def watch(tensor: str, array: Array) -> Array:
        alive[tensor] = weakref.ref(array)
        return array

    bench.run.begin({name: watch(name, np.array([1])) for name in graph.inputs})
    while bench.jobs:
        job = bench.jobs.pop(data.draw(st.integers(0, len(bench.jobs) - 1)))
        outputs = compute(job.step, job.inputs)
        for own, array in outputs.items():
            watch(job.step.outputs[own], array)
        job.inputs = {}
        job.done(outputs)
        del outputs, array
        needed = set(graph.outputs) | {tensor for other in bench.jobs for tensor in other.step.inputs.values()}
        begun = {job.step.name for job in bench.all}
        # What waits for a step that has not started is needed by it, unless the step was skipped.
        waiting = [one for one in graph.steps if one.name not in begun]
        needed |= {tensor for one in waiting for tensor in one.reads}
        assert {tensor for tensor, found in alive.items() if found() is not None} <= needed
    assert len(bench.told) == 1
    bench.told.clear()
    assert not [tensor for tensor, found in alive.items() if found() is not None]


@settings(deadline=None, max_examples=300)
@given(graphs(), st.data())
def test_every_run_ends_once_whatever_happens(graph: Graph, data: st.DataObject) -> None:
    bench = Bench(graph)
    if data.draw(st.booleans()):
        bench.refuse[data.draw(st.sampled_from([one.name for one in graph.steps]))] = Unavailable("no")
    bench.begin(**dict.fromkeys(graph.inputs, 1))
    while bench.jobs:
        job = bench.jobs.pop(data.draw(st.integers(0, len(bench.jobs) - 1)))
        match data.draw(st.sampled_from(["finish", "finish", "fail", "cancel", "twice"])):
            case "finish":
                job.finish()
            case "fail":
                job.done(PenstockError("broken"))
            case "cancel":
                bench.run.cancel()
            case _:
                outputs = compute(job.step, job.inputs)
                job.done(outputs)
                job.done(outputs)
    assert len(bench.told) == 1
    bench.run.cancel()
    assert len(bench.told) == 1
