"""The declaration of a pipeline: steps that read and produce named tensors. The graph is checked once, so that no run can deadlock.

A step is a model, or a transform before or after a model. Inputs and outputs have names.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig
from penstock.pipeline.condition import Condition
from penstock.pipeline.value import Value
from penstock.tensor import DataType, Signature, TensorSpec


class PipelineStep(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One step. ``inputs`` and ``outputs`` map the step's own tensor names to tensors of the graph."""

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    condition: Condition | None = None
    """If the condition does not hold, the step is skipped and its outputs are absent."""
    optional: frozenset[str] = frozenset()
    """Inputs that may be absent. If a required input is absent, the step is skipped."""
    signature: Signature | None = None
    """Inputs and outputs of the step, with the batch dimension, if known."""
    batchable: bool = False
    """True if the first dimension of all the step's tensors is the batch dimension."""

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The graph's tensors that must be produced, or be known to be absent, before the step can start."""
        read = self.inputs.values()
        return frozenset(read) if self.condition is None else frozenset((*read, self.condition.tensor))

    def take(self, values: Mapping[str, Value | None]) -> dict[str, Value] | None:
        """The step's inputs; None if the step is skipped. Absent ``values`` are missing or None.

        Raises InvalidArgument if the condition cannot be decided.
        """
        inputs = {}
        for own, tensor in self.inputs.items():
            value = values.get(tensor)
            if value is not None:
                inputs[own] = value
            elif own not in self.optional:
                return None
        if self.condition is not None:
            decides = values.get(self.condition.tensor)
            if decides is None or not self.condition.holds(decides):
                return None
        return inputs


class GraphPlan(msgspec.Struct, frozen=True, eq=False):
    """The steps to run for the outputs ``wanted``. A tensor can be freed after ``uses`` reads."""

    steps: tuple[PipelineStep, ...]
    """In topological order."""
    inputs: tuple[str, ...]
    wanted: tuple[str, ...]
    optional: frozenset[str]
    """Outputs of the graph that may be absent."""
    readers: Mapping[str, Sequence[int]]
    """Maps each tensor to the indices in ``steps`` of the steps that read it."""
    uses: Mapping[str, int]
    """Maps each tensor to the number of steps that read it, plus one if it is a wanted output."""
    givers: Mapping[str, int]
    """Maps each tensor to the number of steps that may produce it. If all these steps are skipped, the tensor is absent."""
    releases: Sequence[Sequence[str]]
    """For each step, the tensors that no step reads after it, if the steps run in order."""


class Graph(msgspec.Struct, frozen=True, eq=False):
    """A checked pipeline, made by ``declare``."""

    steps: tuple[PipelineStep, ...]
    """In topological order."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    optional: frozenset[str]
    warnings: tuple[str, ...]
    """Declarations that are allowed but probably mistakes."""

    def plan(self, wanted: Sequence[str]) -> GraphPlan:
        """The plan for the outputs ``wanted``, which must be outputs of the graph. Steps that these outputs do not need are left
        out."""
        needed, kept = set(wanted), []
        for step in reversed(self.steps):
            if not needed.isdisjoint(step.outputs.values()):
                needed |= step.reads
                kept.append(step)
        readers: dict[str, list[int]] = defaultdict(list)
        for position, step in enumerate(reversed(kept)):
            for tensor in step.reads:
                readers[tensor].append(position)
        uses = Counter({tensor: len(them) for tensor, them in readers.items()}) + Counter(wanted)
        givers = Counter([*self.inputs, *(tensor for step in kept for tensor in step.outputs.values())])
        last = {tensor: max(them) for tensor, them in readers.items() if tensor not in wanted}
        releases = [[tensor for tensor in step.reads if last.get(tensor) == n] for n, step in enumerate(reversed(kept))]
        return GraphPlan(
            tuple(reversed(kept)), self.inputs, tuple(wanted), self.optional, dict(readers), uses, givers, releases
        )


def declare(
    signature: Signature,
    steps: Sequence[PipelineStep],
    *,
    batchable: bool = False,
    optional: frozenset[str] = frozenset(),
) -> Graph:
    """Check ``steps``, and make the graph with ``signature``. Any input, and any output in ``optional``, may be absent from a request.

    Raises InvalidConfig for unknown tensors, tensors with two producers (unless their conditions exclude one another), outputs without
    a producer, cycles, and datatypes or shapes that do not fit. The message names the step or the tensor.
    """
    inputs, outputs = tuple(signature.input_names), tuple(signature.output_names)
    for name, count in Counter(step.name for step in steps).items():
        if count > 1:
            raise InvalidConfig(f"{count} steps are called '{name}'", "give each a different name")
    givers = _givers(inputs, steps)
    known, read = {*inputs, *givers}, set(outputs).union(*(step.reads for step in steps))
    for step in steps:
        for tensor in sorted(step.reads - known):
            raise InvalidConfig(
                f"step '{step.name}' reads tensor '{tensor}', which no step produces", did_you_mean(tensor, known)
            )
    for output in outputs:
        if output not in known:
            raise InvalidConfig(f"no step produces output '{output}'", did_you_mean(output, givers))
    for output in sorted(optional.difference(outputs)):
        raise InvalidConfig(
            f"the optional output '{output}' is not an output of the graph", did_you_mean(output, outputs)
        )
    ordered = _sort(steps, givers)
    _check_types(signature, batchable, steps)
    warnings = tuple(f"tensor '{tensor}' is not used" for tensor in (*inputs, *givers) if tensor not in read)
    return Graph(ordered, inputs, outputs, optional, warnings)


def _givers(inputs: Sequence[str], steps: Iterable[PipelineStep]) -> dict[str, list[PipelineStep]]:
    """For each tensor, the steps that produce it."""
    givers: dict[str, list[PipelineStep]] = {}
    for step in steps:
        for own, tensor in step.outputs.items():
            if tensor in inputs:
                raise InvalidConfig(
                    f"output '{own}' of step '{step.name}' is tensor '{tensor}', which is an input of the graph"
                )
            for other in givers.setdefault(tensor, []):
                if step.condition is None or other.condition is None or not step.condition.excludes(other.condition):
                    raise InvalidConfig(
                        f"tensor '{tensor}' is produced by step '{other.name}' and by step '{step.name}'",
                        "only steps with conditions that exclude one another may produce the same tensor",
                    )
            givers[tensor].append(step)
    return givers


def _sort(steps: Sequence[PipelineStep], givers: Mapping[str, Sequence[PipelineStep]]) -> tuple[PipelineStep, ...]:
    """``steps`` in topological order."""
    waits = {step: {giver for tensor in step.reads for giver in givers.get(tensor, ())} for step in steps}
    left, followers = {step: len(before) for step, before in waits.items()}, defaultdict(list)
    for step, before in waits.items():
        for giver in before:
            followers[giver].append(step)
    ordered = [step for step in steps if not left[step]]
    for step in ordered:  # which grows
        for follower in followers[step]:
            left[follower] -= 1
            if not left[follower]:
                ordered.append(follower)
    if len(ordered) < len(steps):
        raise InvalidConfig(f"steps wait for one another: {_cycle(waits, set(steps) - set(ordered))}")
    return tuple(ordered)


def _cycle(waits: Mapping[PipelineStep, set[PipelineStep]], stuck: set[PipelineStep]) -> str:
    """One cycle among the steps ``stuck``, each of which waits for another."""
    step, path = min(stuck, key=lambda one: one.name), list[PipelineStep]()
    while step not in path:
        path.append(step)
        step = min(waits[step] & stuck, key=lambda one: one.name)
    return " -> ".join(f"'{one.name}'" for one in (step, *reversed(path[path.index(step) :])))


class _End(msgspec.Struct, frozen=True):
    """One end of a tensor: where it is produced or read, and its type there."""

    place: str
    tensor: str
    spec: TensorSpec
    batchable: bool

    def fits(self, other: _End) -> bool:
        """True if the types are compatible. A batch of one row is compatible with a tensor without batch dimension."""
        if self.spec.datatype is not other.spec.datatype:
            return False
        one, two = self.spec.shape, other.spec.shape
        if self.batchable != other.batchable and len(one) != len(two):
            one, two = one[int(self.batchable) :], two[int(other.batchable) :]
        return len(one) == len(two) and all(a == b or -1 in (a, b) for a, b in zip(one, two, strict=True))

    def __str__(self) -> str:
        return f"{self.spec.datatype.value} {list(self.spec.shape)} {self.place}"


def _check_types(signature: Signature, batchable: bool, steps: Sequence[PipelineStep]) -> None:
    sinks = [_End("as an output", spec.name, spec, batchable) for spec in signature.outputs]
    sources = defaultdict(
        list, {spec.name: [_End("as an input", spec.name, spec, batchable)] for spec in signature.inputs}
    )
    for step in steps:
        if step.signature is None:
            continue
        for spec in step.signature.inputs:
            if spec.name not in step.inputs and spec.name not in step.optional:
                raise InvalidConfig(f"input '{spec.name}' of step '{step.name}' has no tensor", "map a tensor to it")
        sinks += _ends(step, "input", step.signature.inputs, step.inputs)
        for end in _ends(step, "output", step.signature.outputs, step.outputs):
            sources[end.tensor].append(end)
    for sink in sinks:
        for source in sources[sink.tensor]:
            if not source.fits(sink):
                raise InvalidConfig(f"tensor '{sink.tensor}' is {source}, but {sink}")
    for step in steps:
        for source in sources[step.condition.tensor] if step.condition else ():
            row = source.spec.shape[1:] if source.batchable else source.spec.shape
            if source.spec.datatype is DataType.BYTES or any(dim not in (1, -1) for dim in row):
                raise InvalidConfig(
                    f"'{step.condition}' of step '{step.name}' needs one number, but the tensor is {source}"
                )


def _ends(step: PipelineStep, kind: str, specs: Sequence[TensorSpec], mapping: Mapping[str, str]) -> Iterator[_End]:
    by_name = {spec.name: spec for spec in specs}
    for own, tensor in mapping.items():
        if own not in by_name:
            raise InvalidConfig(f"step '{step.name}' has no {kind} '{own}'", did_you_mean(own, by_name))
        yield _End(f"as {kind} '{own}' of step '{step.name}'", tensor, by_name[own], step.batchable)
