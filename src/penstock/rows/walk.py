"""Follows the rows through a graph, node by node, including model functions, branches and loops."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.rows.call import RULES, Call, Facts
from penstock.rows.facts import Dependent, Fact, join, stop
from penstock.rows.graph import Attribute, AttributeReference, OnnxGraph, OnnxModel, OnnxNode
from penstock.rows.rules import attention, axes, classical, elementwise, indexing, linear, shapes
from penstock.rows.sizes import Number, Size, depends_on_batch, symbol

FAMILIES = (attention, axes, classical, elementwise, indexing, linear, shapes)
"""The modules that register rules."""
OPSETS = range(7, 29)
"""The versions of the standard operators that the rules describe."""
_MAX_NODES = 200_000
"""Limit on the nodes to visit, since nested functions can expand a small model to any number of nodes."""
_MAX_DEPTH = 40
_MAX_TURNS = 4
"""Maximum number of attempts to find facts that hold for a loop's states in every iteration."""


class Scope(NamedTuple):
    """The context of a graph: facts of tensors in outer graphs, opset versions, and attributes of the enclosing function."""

    outer: Mapping[str, Fact]
    opsets: Mapping[str, int]
    attributes: Mapping[str, Attribute]
    depth: int = 0


class Walk:
    """One pass over ``model``. Raises Dependent, which names the node at which the proof stops."""

    def __init__(self, model: OnnxModel) -> None:
        self._model = model
        self._unknowns = (symbol(f"?{number}") for number in itertools.count())
        self._nodes = 0

    def run(self, inputs: Mapping[str, Fact], wanted: Sequence[str]) -> list[Fact]:
        """The facts about the tensors ``wanted`` of the model's graph."""
        return self._graph(self._model.graph, inputs, Scope({}, self._model.opsets, {}), wanted)

    def _graph(self, graph: OnnxGraph, inputs: Mapping[str, Fact], scope: Scope, wanted: Sequence[str]) -> list[Fact]:
        if scope.depth > _MAX_DEPTH:
            stop("nests subgraphs too deeply")
        known = {
            **scope.outer,
            **{name: Fact(tensor.dims, tensor=tensor) for name, tensor in graph.tensors.items()},
            **inputs,
        }
        for node in _needed(graph, wanted):
            self._nodes += 1
            if self._nodes > _MAX_NODES:
                stop(f"belongs to a model of more than {_MAX_NODES} nodes")
            try:
                outputs = self._node(node, known, scope)
            except Dependent as reason:
                raise Dependent(reason.reason, reason.node or node) from None
            except (ArithmeticError, LookupError, TypeError, ValueError):
                raise Dependent("cannot be analysed", node) from None
            # A graph must not redefine a name of an outer graph, so this assignment replaces no fact.
            known.update({name: fact for name, fact in zip(node.outputs, outputs, strict=False) if name and fact})
        return [_find(known, name) for name in wanted]

    def _node(self, node: OnnxNode, known: Mapping[str, Fact], scope: Scope) -> Facts:
        inputs = [_find(known, name) if name else None for name in node.inputs]
        if any(isinstance(value, AttributeReference) for value in node.attributes.values()):
            node = node._replace(attributes=_resolved(node.attributes, scope.attributes))
        inner = Scope(known, scope.opsets, scope.attributes, scope.depth + 1)
        if (node.domain, node.operator, node.overload) in self._model.functions:
            return self._function(node, inputs, inner)
        version = scope.opsets.get(node.domain, 1)
        if not node.domain and version not in OPSETS:
            stop(f"is of opset {version}, but only opsets {OPSETS[0]} to {OPSETS[-1]} are supported")
        if not node.domain and node.operator in {"If", "Loop", "Scan"}:
            return {"If": self._if, "Loop": self._loop, "Scan": self._scan}[node.operator](node, inputs, inner)
        rule = RULES.get((node.domain, node.operator))
        if rule is None:
            stop("is an operator that is not known to keep rows apart")
        call = Call(node, version, inputs, self._unknowns)
        outputs = rule(call)
        found: Facts = [outputs] if isinstance(outputs, Fact) else outputs
        call.check(found)
        return found

    def _function(self, node: OnnxNode, inputs: Facts, scope: Scope) -> Facts:
        if (node.domain, node.operator) in RULES or (not node.domain and node.operator in {"If", "Loop", "Scan"}):
            stop("is a model function with the name of a known operator")
        function = self._model.functions[node.domain, node.operator, node.overload]
        # ONNX Runtime runs the body with the model's opsets.
        if any(self._model.opsets.get(domain, version) != version for domain, version in function.opsets.items()):
            stop("is a model function that imports a different opset than the model")
        given = {name: fact for name, fact in zip(function.body.inputs, inputs, strict=False) if fact is not None}
        inner = Scope({}, function.opsets, {**function.defaults, **node.attributes}, scope.depth)
        wanted = [inside for inside, outside in zip(function.body.outputs, node.outputs, strict=False) if outside]
        found = iter(self._graph(function.body, given, inner, wanted))
        return [next(found) if outside else None for outside in node.outputs]

    def _if(self, node: OnnxNode, inputs: Facts, scope: Scope) -> Facts:
        condition = inputs[0]
        if not _is_constant(condition):
            stop("selects a branch by the content or number of rows")
        assert condition is not None
        branches = [node.attributes["then_branch"], node.attributes["else_branch"]]
        value = condition.value
        if value is not None and not isinstance(value.flat[0], Size):
            branches = branches[:1] if value.flat[0] else branches[1:]
        found = [self._graph(branch, {}, scope, branch.outputs) for branch in branches]
        return (
            [*found[0]]
            if len(found) == 1
            else [join(one, other, self._unknowns) for one, other in zip(*found, strict=True)]
        )

    def _loop(self, node: OnnxNode, inputs: Facts, scope: Scope) -> Facts:
        body: OnnxGraph = node.attributes["body"]
        if not all(fact is None or _is_constant(fact) for fact in inputs[:2]):
            stop("has a number of iterations that depends on the rows, or on their number")
        names = body.inputs[2:]
        start = _states(inputs[2:])
        fixed = dict(zip(body.inputs[:2], (Fact(()), Fact(())), strict=True))
        states, outputs = self._settled(body, names, start, fixed, scope, skipped=1)
        if not _is_constant(outputs[0]):
            stop("has a number of iterations that depends on the rows, or on their number")
        return [*states, *(self._stacked(fact, 0) for fact in outputs[1 + len(names) :])]

    def _scan(self, node: OnnxNode, inputs: Facts, scope: Scope) -> Facts:
        if scope.opsets.get("", 1) < 9:
            stop("is a Scan before version 9")
        body: OnnxGraph = node.attributes["body"]
        count = len(body.inputs) - node.attributes["num_scan_inputs"]
        scanned, fixed = _states(inputs[count:]), {}
        places = node.attributes.get("scan_input_axes") or (0,) * len(scanned)
        for name, fact, place in zip(body.inputs[count:], scanned, places, strict=True):
            axis = place % fact.rank
            if fact.axis == axis:
                stop("iterates over the rows of a batch")
            fixed[name] = Fact([*fact.shape[:axis], *fact.shape[axis + 1 :]])
        start = _states(inputs[:count])
        states, outputs = self._settled(body, body.inputs[:count], start, fixed, scope, skipped=0)
        stacked = outputs[count:]
        axes = node.attributes.get("scan_output_axes") or (0,) * len(stacked)
        return [*states, *(self._stacked(fact, axis) for fact, axis in zip(stacked, axes, strict=True))]

    def _settled(
        self,
        body: OnnxGraph,
        names: Sequence[str],
        states: list[Fact],
        fixed: Mapping[str, Fact],
        scope: Scope,
        skipped: int,
    ) -> tuple[list[Fact], list[Fact]]:
        """The facts about the states and the other outputs of ``body`` that hold after any number of iterations."""
        loose: set[Number] = set()
        for _ in range(_MAX_TURNS):
            outputs = self._graph(body, {**fixed, **dict(zip(names, states, strict=True))}, scope, body.outputs)
            ends = outputs[skipped : skipped + len(states)]
            again, changed = [], False
            for state, end in zip(states, ends, strict=True):
                both = join(Fact(state.shape), Fact(end.shape) if not end.holds_batch_size else end, self._unknowns)
                # A size that changes once may change in every iteration.
                shape = [old if old in loose else new for old, new in zip(state.shape, both.shape, strict=True)]
                changed |= shape != list(state.shape)
                loose.update(new for old, new in zip(state.shape, shape, strict=True) if new != old)
                again.append(Fact(shape))
            if not changed:
                # A size that changes between iterations has a single final value, which gets a new symbol.
                if not loose:
                    return states, outputs
                return [self._hidden(fact) for fact in states], [
                    *outputs[:skipped],
                    *(self._hidden(fact) for fact in outputs[skipped:]),
                ]
            states = again
        return stop("changes the shape of its states in an unsupported way")

    def _hidden(self, fact: Fact) -> Fact:
        sizes = [
            size if isinstance(size, int) or depends_on_batch(size) else next(self._unknowns) for size in fact.shape
        ]
        if any(isinstance(size, Size) and depends_on_batch(size) and len(size.symbols) > 1 for size in sizes):
            stop("changes the shape of its states in an unsupported way")
        return Fact(sizes)

    def _stacked(self, fact: Fact, axis: int) -> Fact:
        if fact.holds_batch_size:
            stop("computes with the batch size")
        place = axis % (fact.rank + 1)
        return Fact([*fact.shape[:place], next(self._unknowns), *fact.shape[place:]])


def _needed(graph: OnnxGraph, wanted: Iterable[str]) -> list[OnnxNode]:
    """The nodes on which the tensors ``wanted`` depend, in graph order."""
    names, found = set(wanted), []
    for node in reversed(graph.nodes):
        if not names.isdisjoint(node.outputs):
            found.append(node)
            names.update(node.inputs, *(_captured(value) for value in node.attributes.values()))
    return found[::-1]


def _captured(value: Attribute) -> set[str]:
    """The names that a subgraph in an attribute reads. Names that the subgraph itself defines are included."""
    if not isinstance(value, OnnxGraph):
        return set()
    names = set(value.outputs)
    for node in value.nodes:
        names.update(node.inputs, *(_captured(inner) for inner in node.attributes.values()))
    return names


def _find(known: Mapping[str, Fact], name: str) -> Fact:
    return known[name] if name in known else stop(f"reads '{name}', which is not known")


def _states(facts: Facts) -> list[Fact]:
    """Facts about the initial states of a loop. Only shapes are kept, because elements can change between iterations."""
    if not all(fact is not None and not fact.holds_batch_size for fact in facts):
        stop("computes with the batch size")
    return [Fact(fact.shape) for fact in facts if fact is not None]


def _is_constant(fact: Fact | None) -> bool:
    return fact is not None and not fact.is_rows and not fact.holds_batch_size


def _resolved(attributes: Mapping[str, Attribute], given: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """``attributes`` with references replaced by the caller's attributes. Attributes that the caller omits are absent."""
    found = {}
    for name, value in attributes.items():
        if not isinstance(value, AttributeReference):
            found[name] = value
        elif value.name in given:
            found[name] = given[value.name]
    return found
