"""A pipeline as it is declared: steps that read and give named tensors; checked once, so that running it cannot get stuck. Pure.

A step is anything with named inputs and outputs: a model, or what is done before and after one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig
from penstock.pipeline.condition import Condition
from penstock.tensor import DataType, Signature, TensorSpec


class Step(msgspec.Struct, frozen=True, eq=False):
    """One step. ``inputs`` and ``outputs`` tell for its own names of them which tensors of the graph they are."""

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    condition: Condition | None = None
    """Where it does not hold, the step is skipped and its outputs are absent."""
    optional: frozenset[str] = frozenset()
    """Those of its own inputs that may be absent; without one of the others it is skipped."""
    signature: Signature | None = None
    """What it takes and gives, with the batch dimension, where that is known."""
    batchable: bool = False
    """Whether the first dimension of all its tensors is the batch's."""

    @property
    def reads(self) -> frozenset[str]:
        """The tensors that must be settled before it can start."""
        read = self.inputs.values()
        return frozenset(read) if self.condition is None else frozenset((*read, self.condition.tensor))


class Plan(msgspec.Struct, frozen=True, eq=False):
    """What is to be run for ``wanted``: the steps in an order in which they could run one after the other, and per tensor who reads
    and who gives it. A tensor can be freed when it has been read ``uses`` times."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    wanted: tuple[str, ...]
    optional: frozenset[str]
    """Those outputs of the graph that may be absent."""
    readers: Mapping[str, Sequence[int]]
    """By tensor, the steps, by position."""
    uses: Mapping[str, int]
    """By tensor, the number of steps that read it, and one more if it is wanted."""
    givers: Mapping[str, int]
    """By tensor, how many steps may give it; a tensor is absent when as many have been skipped."""


class Graph(msgspec.Struct, frozen=True, eq=False):
    """A checked pipeline; made by ``declare``."""

    steps: tuple[Step, ...]
    """In an order in which they could run one after the other."""
    inputs: tuple[str, ...]
    optional_outputs: frozenset[str]
    warnings: tuple[str, ...]
    """What is allowed and probably not meant."""
    whole: Plan
    """For all outputs."""

    def plan(self, wanted: Sequence[str]) -> Plan:
        """For the outputs ``wanted`` only, of which none is unknown; steps that none of them depends on are left out."""
        return _plan(self.steps, self.inputs, wanted, self.optional_outputs)


def declare(
    signature: Signature,
    steps: Sequence[Step],
    *,
    batchable: bool = False,
    optional_outputs: frozenset[str] = frozenset(),
) -> Graph:
    """The graph of ``steps`` that takes and gives ``signature``; its inputs may be absent where every reader can do without.

    Raises InvalidConfig that names step and tensor: unknown tensors, tensors given twice (unless by conditions that exclude one
    another), outputs that nobody gives, cycles, datatypes and shapes that do not fit.
    """
    inputs, outputs = tuple(signature.input_names), tuple(signature.output_names)
    _refuse_same_names(steps)
    givers = _givers(inputs, steps)
    known = {*inputs, *givers}
    for step in steps:
        for tensor in sorted(step.reads - known):
            raise InvalidConfig(
                f"step '{step.name}' reads tensor '{tensor}', which no step gives and which is no input",
                did_you_mean(tensor, known),
            )
    for output in outputs:
        if output not in known:
            raise InvalidConfig(f"no step gives output '{output}'", did_you_mean(output, givers))
    for output in sorted(optional_outputs - set(outputs)):
        raise InvalidConfig(f"the optional output '{output}' is no output", did_you_mean(output, outputs))
    ordered = _sort(steps, givers)
    _check_types(signature, batchable, steps)
    read = {*outputs}.union(*(step.reads for step in steps))
    warnings = (
        *(f"input '{name}' is not used" for name in inputs if name not in read),
        *(f"tensor '{name}' of step '{givers[name][0].name}' is not used" for name in givers if name not in read),
    )
    whole = _plan(ordered, inputs, outputs, optional_outputs)
    return Graph(ordered, inputs, optional_outputs, warnings, whole)


def _refuse_same_names(steps: Iterable[Step]) -> None:
    for name, count in Counter(step.name for step in steps).items():
        if count > 1:
            raise InvalidConfig(f"{count} steps are called '{name}'", "give each a name of its own")


def _givers(inputs: Sequence[str], steps: Iterable[Step]) -> dict[str, list[Step]]:
    """By tensor the steps that give it."""
    givers: dict[str, list[Step]] = {}
    for step in steps:
        for own, tensor in step.outputs.items():
            if tensor in inputs:
                raise InvalidConfig(f"output '{own}' of step '{step.name}' is tensor '{tensor}', which is an input")
            for other in givers.setdefault(tensor, []):
                if step.condition is None or other.condition is None or not step.condition.excludes(other.condition):
                    raise InvalidConfig(
                        f"tensor '{tensor}' is given by step '{other.name}' and by step '{step.name}'",
                        "only steps with conditions that exclude one another can give the same tensor",
                    )
            givers[tensor].append(step)
    return givers


def _sort(steps: Sequence[Step], givers: Mapping[str, Sequence[Step]]) -> tuple[Step, ...]:
    """``steps``, each after those whose tensors it reads."""
    waits = {step: {giver for tensor in step.reads for giver in givers.get(tensor, ())} for step in steps}
    followers: dict[Step, list[Step]] = defaultdict(list)
    for step, before in waits.items():
        for giver in before:
            followers[giver].append(step)
    left = {step: len(before) for step, before in waits.items()}
    ordered = [step for step in steps if not left[step]]
    for step in ordered:  # which grows
        for follower in followers[step]:
            left[follower] -= 1
            if not left[follower]:
                ordered.append(follower)
    if len(ordered) < len(steps):
        raise InvalidConfig(f"steps wait for one another: {_cycle(waits, set(steps) - set(ordered))}")
    return tuple(ordered)


def _cycle(waits: Mapping[Step, set[Step]], stuck: set[Step]) -> str:
    """One cycle among the steps that cannot start, each of which waits for another of them."""
    path = [min(stuck, key=lambda step: step.name)]
    while True:
        step = min(waits[path[-1]] & stuck, key=lambda step: step.name)
        if step in path:
            around = [*path[path.index(step) :], step]
            return " -> ".join(f"'{one.name}'" for one in reversed(around))
        path.append(step)


class _End(msgspec.Struct, frozen=True):
    """Where a tensor comes from or goes to, and what it is there."""

    place: str
    tensor: str
    spec: TensorSpec
    batchable: bool

    def fits(self, other: _End) -> bool:
        """Whether ``other`` can be this. A batch of one row and a tensor without batch dimension can be each other."""
        if self.spec.datatype is not other.spec.datatype:
            return False
        one, two = self.spec.shape, other.spec.shape
        if len(one) == len(two) + 1 and self.batchable and not other.batchable:
            one = one[1:]
        elif len(two) == len(one) + 1 and other.batchable and not self.batchable:
            two = two[1:]
        return len(one) == len(two) and all(a == b or -1 in (a, b) for a, b in zip(one, two, strict=True))

    def __str__(self) -> str:
        return f"{self.spec.datatype.value} {list(self.spec.shape)} {self.place}"


def _check_types(signature: Signature, batchable: bool, steps: Sequence[Step]) -> None:
    sources: dict[str, list[_End]] = defaultdict(list)
    for spec in signature.inputs:
        sources[spec.name].append(_End("as an input", spec.name, spec, batchable))
    sinks = [_End("as an output", spec.name, spec, batchable) for spec in signature.outputs]
    for step in steps:
        sinks += _ends(step, "input", step.inputs)
        for end in _ends(step, "output", step.outputs):
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
                    f"the condition '{step.condition}' of step '{step.name}' needs one number, but the tensor is {source}"
                )


def _ends(step: Step, kind: str, mapping: Mapping[str, str]) -> Iterator[_End]:
    """Those ends of ``step`` that are known."""
    if step.signature is None:
        return
    specs = {spec.name: spec for spec in (step.signature.inputs if kind == "input" else step.signature.outputs)}
    for own, tensor in mapping.items():
        if own not in specs:
            raise InvalidConfig(f"step '{step.name}' has no {kind} '{own}'", did_you_mean(own, specs))
        yield _End(f"as {kind} '{own}' of step '{step.name}'", tensor, specs[own], step.batchable)
    for name in specs if kind == "input" else ():
        if name not in mapping and name not in step.optional:
            raise InvalidConfig(
                f"input '{name}' of step '{step.name}' is not given any tensor", "add it to the step's inputs"
            )


def _plan(ordered: Sequence[Step], inputs: tuple[str, ...], wanted: Sequence[str], optional: frozenset[str]) -> Plan:
    needed, kept = set(wanted), []
    for step in reversed(ordered):
        if not needed.isdisjoint(step.outputs.values()):
            needed |= step.reads
            kept.append(step)
    steps = tuple(reversed(kept))
    readers: dict[str, list[int]] = defaultdict(list)
    for position, step in enumerate(steps):
        for tensor in step.reads:
            readers[tensor].append(position)
    uses = Counter(wanted)
    uses.update({tensor: len(them) for tensor, them in readers.items()})
    givers = Counter(tensor for step in steps for tensor in step.outputs.values())
    givers.update(inputs)
    return Plan(steps, inputs, tuple(wanted), optional, dict(readers), dict(uses), dict(givers))
