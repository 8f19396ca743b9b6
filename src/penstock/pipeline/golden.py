"""Golden samples: examples of a pipeline with the results of all its steps, recorded when it is packed and compared when it is loaded.

Texts, files and whole numbers must be equal. Floating-point numbers may differ by a tolerance, relative to the largest number of the
array. A large array of floating-point numbers is compared at evenly spaced elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np

from penstock.errors import IntegrityError, PenstockError
from penstock.pipeline.function import Function, models_of
from penstock.pipeline.streaming.fusing import fused
from penstock.pipeline.value import Value, check_inputs
from penstock.tensor import Array, DataType, as_bytes, from_wire, to_wire

_MAX_ELEMENTS = 4_096
"""Number of floating-point numbers of an array that are recorded."""
_MAX_ITEMS = 1_000
"""Number of values of a list that are recorded."""
TOLERANCE = 1e-4
"""Tolerance of models in FP32."""


class ItemRunner(Protocol):
    """Runs a function for one item."""

    @property
    def function(self) -> Function: ...

    def call(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The outputs. Raises PenstockError."""
        ...


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value, or as much of it as the comparison needs."""

    kind: str
    """``array``, ``text``, ``file``, ``list``, or ``absent`` if the step was skipped."""
    datatype: DataType | None = None
    shape: tuple[int, ...] = ()
    digest: str = ""
    """SHA-256 of the value, unless it is an array of floating-point numbers."""
    sample: bytes = b""
    """Evenly spaced elements of an array of floating-point numbers, as FP64."""
    items: tuple[Recorded, ...] = ()


class Example(msgspec.Struct, frozen=True):
    """One example: its inputs, and all values of the pipeline by name."""

    inputs: dict[str, ExampleInput]
    values: dict[str, Recorded]


class ExampleInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One input of an example."""

    file: str = ""
    """Path of a file of the pipeline with the content."""
    text: str = ""
    array: bytes = b""
    datatype: DataType | None = None
    """Datatype of ``array``; None for text and files."""
    shape: tuple[int, ...] = ()

    def value(self, files: Mapping[str, bytes]) -> Value:
        """The value of the input. Raises InvalidArgument if the array has the wrong size."""
        if self.file:
            return files[self.file]
        return from_wire(self.array, self.datatype, self.shape) if self.datatype is not None else self.text


class Golden(msgspec.Struct, frozen=True):
    """All examples, and the variant of each model that ran when they were recorded."""

    examples: tuple[Example, ...]
    variants: dict[str, str]


def recorded(value: Value) -> Recorded:
    """What is kept of ``value``."""
    if value is None:
        return Recorded("absent")
    if isinstance(value, str | bytes):
        return Recorded("text" if isinstance(value, str) else "file", digest=_digest(as_bytes(value)))
    if isinstance(value, list | tuple):
        return Recorded("list", shape=(len(value),), items=tuple(map(recorded, value[:_MAX_ITEMS])))
    array = np.asarray(value)
    datatype = DataType.from_numpy(array.dtype)
    if not datatype.is_float:
        return Recorded("array", datatype, array.shape, _digest(bytes(to_wire(array))))
    return Recorded("array", datatype, array.shape, sample=_sample(array).tobytes())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sample(array: Array) -> Array:
    flat = array.reshape(-1)
    if flat.size > _MAX_ELEMENTS:
        flat = flat[np.linspace(0, flat.size - 1, _MAX_ELEMENTS).astype(np.int64)]
    return flat.astype("<f8")


def difference(before: Recorded, now: Recorded, tolerance: float) -> str:
    """How the value ``now`` differs from the recorded value; empty if it does not."""
    if before.kind != now.kind:
        return f"it is {_KINDS[now.kind]}, and was {_KINDS[before.kind]}"
    if (before.datatype, before.shape) != (now.datatype, now.shape):
        return f"it is {_shown(now)}, and was {_shown(before)}"
    if before.digest != now.digest:
        return "its content is different"
    if len(before.items) != len(now.items) or len(before.sample) != len(now.sample):
        return "its recorded elements are incomplete"
    pairs = enumerate(zip(before.items, now.items, strict=True))
    inner = (f"element {n}: {reason}" for n, (one, two) in pairs if (reason := difference(one, two, tolerance)))
    return next(inner, "") or _float_difference(
        np.frombuffer(before.sample, "<f8"), np.frombuffer(now.sample, "<f8"), tolerance
    )


def _shown(value: Recorded) -> str:
    shape = list(value.shape)
    return f"{value.datatype.value} {shape}" if value.datatype is not None else f"{value.kind} {shape}"


_KINDS = {"array": "an array", "text": "a text", "file": "a file", "list": "a list", "absent": "absent"}


def _float_difference(one: Array, two: Array, tolerance: float) -> str:
    finite = np.isfinite(one)
    if not (finite == np.isfinite(two)).all() or not np.array_equal(one[~finite], two[~finite], equal_nan=True):
        return "NaN or infinity is at different places"
    if not finite.any():
        return ""
    gap = float(np.abs(one[finite] - two[finite]).max())
    allowed = tolerance * max(float(np.abs(one[finite]).max()), 1e-6)
    return "" if gap <= allowed else f"it differs by {gap:.3g}, more than the tolerance of {allowed:.3g}"


def observed(function: Function) -> Function:
    """``function`` with the results of all its steps as outputs."""
    values = tuple(dict.fromkeys(value for step in function.graph.steps for value in step.outputs.values()))
    wanted = set(function.graph.outputs) - function.graph.optional
    graph = msgspec.structs.replace(function.graph, outputs=values, optional=frozenset(values) - wanted)
    return msgspec.structs.replace(function, outputs={name: function.types[name] for name in values}, graph=graph)


def replayed(function: Function) -> list[Function]:
    """The functions whose values are compared at load: all steps apart, and, if calls run some of them joined, the joined steps."""
    joined = fused(function, function.graph.outputs)
    return [observed(one) for one in ([function] if joined is function else [function, joined])]


def record(runner: ItemRunner, inputs: Mapping[str, Value]) -> dict[str, Recorded]:
    """All values of one run of ``runner``, which runs an ``observed`` function. Raises PenstockError."""
    found = runner.call(inputs)
    return {name: recorded(found.get(name)) for name in runner.function.outputs}


def replay(
    runner: ItemRunner,
    golden: Golden,
    files: Mapping[str, bytes],
    variants: Mapping[str, str],
    tolerances: Mapping[str, float] = {},
) -> None:
    """Run all examples by ``runner``, which runs a ``replayed`` function, and compare the results of all its steps.

    ``variants`` and ``tolerances`` have the variant of each model that runs, and its tolerance. If another variant was recorded, steps
    after this model are not compared. Raises IntegrityError with the first step that differs.
    """
    limits = _limits(
        runner.function, {name for name in variants if variants[name] != golden.variants.get(name)}, tolerances
    )
    for number, example in enumerate(golden.examples, 1):
        try:
            given = {name: one.value(files) for name, one in example.inputs.items()}
            inputs = check_inputs(runner.function.inputs, given)
            values = record(runner, inputs)
        except PenstockError as error:
            raise IntegrityError(f"example {number} fails: {error.message}", error.hint) from error
        for step, name, tolerance in limits:
            if name not in example.values:
                raise IntegrityError(f"example {number} has no recorded value '{name}'", "pack the pipeline again")
            if reason := difference(example.values[name], values[name], tolerance):
                raise IntegrityError(
                    f"example {number} does not give its recorded results: step '{step}' is the first that differs: "
                    f"in '{name}', {reason}",
                    "install the library versions with which it was packed, or pack it again on this machine",
                )


def _limits(function: Function, changed: set[str], tolerances: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """For each value to compare, in the order of the steps: its step, its name and its tolerance."""
    found: list[tuple[str, str, float]] = []
    known = dict.fromkeys(function.inputs, TOLERANCE)
    skipped: set[str] = set()
    for step in function.graph.steps:
        models = set(models_of(function.work[step.name]))
        tolerance = max(
            (
                *(known.get(name, TOLERANCE) for name in step.reads),
                *(tolerances.get(name, TOLERANCE) for name in models),
            ),
            default=TOLERANCE,
        )
        is_skipped = not skipped.isdisjoint(step.reads) or not changed.isdisjoint(models)
        for name in step.outputs.values():
            known[name] = max(tolerance, known.get(name, 0.0))
            if is_skipped:
                skipped.add(name)
            else:
                found.append((step.name, name, known[name]))
    return found
