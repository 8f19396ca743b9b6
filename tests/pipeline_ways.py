"""The ways to run a pipeline in this process, and what they must agree on: outputs to the bit, errors, absent outputs."""

from __future__ import annotations

import gc
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, PenstockError, prefixed
from penstock.pipeline.check import checked
from penstock.pipeline.declaration import Declaration, parse
from penstock.pipeline.direct import Direct
from penstock.pipeline.executor import Told, wanted_of
from penstock.pipeline.function import Function, MapStep, ModelStep
from penstock.pipeline.presence import check_presence
from penstock.pipeline.source import SourceText
from penstock.pipeline.streaming.binding import bind, run_step
from penstock.pipeline.streaming.fusing import fused
from penstock.pipeline.streaming.line import Line
from penstock.pipeline.streaming.models import LocalModel
from penstock.pipeline.streaming.stage import StageSpec
from penstock.pipeline.streaming.stages import Stages
from penstock.pipeline.streaming.step_process import StepProcess
from penstock.pipeline.value import Media, Value, ValueType, check_inputs
from penstock.tensor import DataType, as_bytes
from pipeline_parts import catalogue
from random_pipelines import RESOURCES, RandomPipeline
from random_values import random_inputs

Models = Mapping[str, LocalModel]
Items = Sequence[Mapping[str, Value]]


class Case(NamedTuple):
    """A random pipeline with inputs."""

    data: dict[str, Any]
    declaration: Declaration
    function: Function
    items: Items

    @property
    def media(self) -> dict[str, Media]:
        return {name: given.media for name, given in self.declaration.inputs.items()}


def draw(random: Random, count: int = 4) -> Case:
    """A pipeline with ``count`` items."""
    data = RandomPipeline(random, catalogue().traits).data
    declaration = parse(SourceText("pipeline.yaml", data, {}))
    function = checked(declaration, catalogue().traits, RESOURCES, allow_python=True)
    check_presence(declaration, function)
    case = Case(data, declaration, function, ())
    items = [check_inputs(function.inputs, random_inputs(random, function.inputs, case.media)) for _ in range(count)]
    return case._replace(items=items)


def check_ways(case: Case, random: Random, process: StepProcess | None = None) -> None:
    """Raises AssertionError unless all ways to run ``case`` in this process do the same."""
    function, models, items = case.function, catalogue().loaded, case.items
    with _quiet():
        apart, wanted = ([expected(one, models, item) for item in items] for one in (function, joined(function)))
    for one, two in zip(apart, wanted, strict=True):
        assert len(one.errors) == len(two.errors), f"{one.errors} apart, and {two.errors} joined"
        if not one.errors:
            check_types(function, one.outputs)
            check(two, one.outputs)
    ways = {
        "direct": partial(direct, function, models),
        "called": partial(called, function, models),
        "streamed": partial(streamed, function, models, random=random),
        "in a line": partial(in_line, function, models),
    }
    if process is not None:
        ways["in a process"] = partial(in_line, function, models, process=process)
    for name, run in ways.items():
        with _quiet():
            found = run(items)
        for number, (want, told) in enumerate(zip(wanted, found, strict=True)):
            try:
                check(want, told)
            except AssertionError as error:
                raise AssertionError(f"{name}, item {number}: {error}") from None
        assert not own_threads()
    if len(function.outputs) > 1:
        check_some(function, items, random)


def check_some(function: Function, items: Items, random: Random) -> None:
    """Raises AssertionError unless some outputs are the same, as a request names them."""
    models, names = catalogue().loaded, list(function.outputs)
    some = random.sample(names, random.randint(1, len(names)))
    runner, all_joined, some_joined = Direct(function, models, some), joined(function), joined_for(function, some)
    for item in items:
        told: list[Told] = []
        with _quiet(), Line(bind(function, models)) as line:
            line.begin(0, item, told.append, some)
            line.wait(lambda told=told: bool(told))  # type: ignore[misc]
            check(expected(all_joined, models, item, some), told[0])
            check(expected(some_joined, models, item, some), outcome(partial(runner.call, item)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore what Pillow says about damaged metadata, and numpy about NaN and infinity in inputs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


class Expected(NamedTuple):
    """What one item gives: its outputs, or one of the errors of its steps. Which one comes first depends on the order of steps."""

    outputs: dict[str, Value]
    errors: tuple[PenstockError, ...]
    ran: Counter[str] = Counter()
    """How often each class of steps ran with success, and each size of a ``map``, as ``map 300``."""


def expected(function: Function, models: Models, inputs: Mapping[str, Value], outputs: Sequence[str] = ()) -> Expected:
    """Run the steps one by one, also those after one that fails, if they do not need its results."""
    wanted = tuple(outputs or function.graph.outputs)
    plan = function.graph.plan(wanted)
    values, lost, errors = dict(inputs), set[str](), list[PenstockError]()
    ran = Counter[str]()
    for step in plan.steps:
        if not lost.isdisjoint(step.reads):
            lost.update(step.outputs.values())
            continue
        found: Mapping[str, Value] = {}
        failed: Sequence[PenstockError] = ()
        try:
            if (taken := step.take(values)) is None:
                continue
            found, failed = _run(function.work[step.name], models, taken, tuple(step.outputs), ran)
        except PenstockError as error:
            failed = [error]
        if failed:
            errors += (prefixed(f"step '{step.name}': ", error) for error in failed)
            lost.update(step.outputs.values())
        else:
            values |= {tensor: found[own] for own, tensor in step.outputs.items()}
    if not errors:
        try:
            return Expected(wanted_of(plan, values), (), ran)
        except InvalidArgument as error:
            errors.append(error)
    return Expected({}, tuple(errors), ran)


def _run(
    work: Any, models: Models, inputs: dict[str, Value], outputs: tuple[str, ...], ran: Counter[str]
) -> tuple[Mapping[str, Value], Sequence[PenstockError]]:
    if isinstance(work, ModelStep):
        return work.from_model(models[work.model].forward(work.to_model(inputs))), ()
    if isinstance(work, MapStep):
        results, errors = list[dict[str, Value]](), list[PenstockError]()
        for number, element in enumerate(inputs[work.over]):
            one = expected(work.inner, models, {**inputs, work.as_: element}, outputs)
            ran.update(one.ran)
            results.append(one.outputs)
            errors += (prefixed(f"element {number}: ", error) for error in one.errors)
        ran[f"map {len(results)}"] += not errors
        return {} if errors else {name: [one[name] for one in results] for name in outputs}, errors
    found = work.run(inputs)
    ran.update(base.__name__ for one in (work, *getattr(work, "steps", ())) for base in type(one).__mro__)
    return found, ()


def joined(function: Function) -> Function:
    """``function`` with joined steps, in maps too, so that errors name the steps that run."""
    work = {
        name: msgspec.structs.replace(one, inner=joined_for(one.inner, outputs)) if isinstance(one, MapStep) else one
        for name, one in function.work.items()
        for outputs in [next(tuple(step.outputs) for step in function.graph.steps if step.name == name)]
    }
    return fused(msgspec.structs.replace(function, work=work), function.graph.outputs)


def joined_for(function: Function, outputs: Sequence[str]) -> Function:
    return fused(joined(function), outputs)


def check_types(function: Function, outputs: Mapping[str, Value]) -> None:
    """Raises AssertionError if an output is not of its declared type, or a required one is absent."""
    for name, kind in function.outputs.items():
        if name in outputs:
            assert holds(kind, outputs[name]), f"'{name}' is {shown(outputs[name])}, but {kind} is declared"
        else:
            assert name in function.graph.optional, f"'{name}' is absent"
    assert list(outputs) == [name for name in function.outputs if name in outputs]


def holds(kind: ValueType, value: Value) -> bool:
    """True if ``value`` is of the type ``kind``."""
    if kind.many:
        one = msgspec.structs.replace(kind, many=False, count=-1)
        return isinstance(value, list) and kind.count in (-1, len(value)) and all(holds(one, each) for each in value)
    if kind.media is Media.TEXT:
        return isinstance(value, str)
    if kind.media is not Media.TENSOR and kind.datatype is DataType.BYTES:
        return isinstance(value, bytes | np.ndarray)  # the pixels of an input
    return (
        isinstance(value, np.ndarray | np.generic)
        and value.dtype == kind.datatype.dtype
        and len(value.shape) == len(kind.shape)
        and all(want in (-1, size) for want, size in zip(kind.shape, value.shape, strict=True))
    )


def shown(value: Value) -> str:
    if isinstance(value, list):
        return f"list of {len(value)}: {', '.join(sorted({shown(one) for one in value})[:3])}"
    return f"{value.dtype} {value.shape}" if hasattr(value, "dtype") else type(value).__name__


def exact(value: Value) -> Any:
    """``value`` in a form that is equal only if all its bits are."""
    if isinstance(value, list):
        return [exact(one) for one in value]
    if isinstance(value, str | bytes):
        return value
    if value.dtype == object:
        return value.shape, [as_bytes(one) for one in value.reshape(-1)]
    return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()


def check(wanted: Expected, told: Told) -> None:
    """Raises AssertionError unless ``told`` is what was expected."""
    if isinstance(told, PenstockError):
        assert (type(told), told.message, told.hint) in {(type(one), one.message, one.hint) for one in wanted.errors}, (
            f"{type(told).__name__}: {told}, not {[str(one) for one in wanted.errors] or wanted.outputs}"
        )
        return
    assert not wanted.errors, f"{ {name: shown(one) for name, one in told.items()} }, not {wanted.errors}"
    assert list(told) == list(wanted.outputs)
    for name, value in wanted.outputs.items():
        assert exact(told[name]) == exact(value), f"'{name}' is {told[name]!r}, not {value!r}"


def outcome(run: Any) -> Told:
    """What ``run()`` returns, or its error."""
    try:
        found: Told = run()
    except PenstockError as error:
        return error
    return found


def direct(function: Function, models: Models, items: Items) -> list[Told]:
    """By ``Direct``, as calls of ``penstock.open`` do."""
    runner = Direct(function, models)
    return [outcome(partial(runner.call, item)) for item in items]


def called(function: Function, models: Models, items: Items) -> list[Told]:
    """By ``Stages``, one at a time."""
    stages = Stages(function, models)
    return [outcome(partial(stages.call, item)) for item in items]


def streamed(function: Function, models: Models, items: Items, random: Random) -> list[Told]:
    """In another order, several at once. Before, a consumer leaves such a stream."""
    stages, order = Stages(function, models), random.sample(range(len(items)), len(items))
    left: Iterator[Told] = stages.stream((items[n] for n in order), threads=2)
    for _ in zip(range(random.randrange(len(items))), left, strict=False):
        pass
    left.close()  # type: ignore[attr-defined]
    threads, ahead = random.choice((0, 1, 2, 4)), random.choice((None, 1, 2, 16))
    found = stages.stream((items[n] for n in order), threads=threads, ahead=ahead)
    by_number = dict(zip(order, found, strict=True))
    return [by_number[number] for number in range(len(items))]


def in_line(function: Function, models: Models, items: Items, process: StepProcess | None = None) -> list[Told]:
    """By a line whose steps, apart from models, run in ``process``. Afterwards, the line holds nothing."""
    bound = bind(function, models)
    if process is not None:
        bound = msgspec.structs.replace(
            bound, stages={name: _moved(spec, process) for name, spec in bound.stages.items()}
        )
    found: dict[int, Told] = {}
    with Line(bound, threads=0 if process is not None else 2) as line:
        for number, item in enumerate(items):
            line.begin(number, item, partial(found.__setitem__, number))
        line.wait(lambda: len(found) == len(items))
        told = [found.pop(number) for number in range(len(items))]
    assert line.is_empty
    assert not own_threads()
    kept = [_apart(one) for one in told]
    del told
    memory = line._memory
    if memory._arrays:
        gc.collect()
    assert not memory._arrays, "results are still counted"
    return kept


def _moved(spec: StageSpec, process: StepProcess) -> StageSpec:
    """``spec``, run in ``process`` unless it is a model."""
    run = spec.run
    if not isinstance(run, partial) or run.func is not run_step:
        return spec
    return msgspec.structs.replace(spec, run=partial(process.run, run.args[0]))


def own_threads() -> list[str]:
    """The names of the threads that run steps."""
    return [one.name for one in threading.enumerate() if one.name.startswith("penstock-")]


def _apart(told: Told) -> Told:
    """A copy of ``told`` that shares no memory with it."""
    if isinstance(told, PenstockError):
        return told
    return {name: _copy(value) for name, value in told.items()}


def _copy(value: Value) -> Value:
    return (
        [_copy(one) for one in value] if isinstance(value, list) else value.copy() if hasattr(value, "dtype") else value
    )
