"""Parity: proves on many calls that an ONNX model computes what its source computes, or names the first node that differs.

::

    cases ── source.forward ──┐
      └───── ONNX Runtime ────┴─ compare, within what rounding explains ─ all agree: the certificate holds
                                                                        └ else: blame, on the smallest call that differs
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, PenstockError
from penstock.inputs.meanings import meanings_of
from penstock.inputs.sizes import Shapes
from penstock.offline.apart import NotStarted, apart
from penstock.offline.convert.base import ConvertOptions, Exported, FrameworkModel, Probing, TensorLink
from penstock.offline.convert.certificate import Certificate, Divergence, Proof
from penstock.offline.convert.parity.blame import Blame, of_failure, of_output
from penstock.offline.convert.parity.cases import Case, Maker
from penstock.offline.convert.parity.compare import OutputDifference, compare
from penstock.offline.convert.parity.coverage import Coverage, shown
from penstock.offline.convert.parity.nodes import Nodes
from penstock.offline.convert.parity.patience import Patience
from penstock.offline.convert.parity.tolerance import RoundingModel
from penstock.offline.convert.parity.tree_nodes import tree_nodes
from penstock.offline.convert.parity.trees import TreeProof, compare_trees
from penstock.offline.convert.parity.weights import altered_weight
from penstock.offline.convert.tree_arrays import HasTrees
from penstock.offline.model_store import keep_models
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import loaded
from penstock.rows.graph import read_graph
from penstock.tensor import Array

_BLAMED = 3
"""Number of different calls on which the first divergent node is looked for."""
_KEPT_BYTES = 1 << 32
"""The sessions of the ONNX model stay loaded up to this size."""

_MISSING = OutputDifference(np.inf, 0.0, "is missing")
_DRAWS = (
    "the source draws from Python's `random` or `numpy.random`, and the ONNX model has the numbers of one call as constants; "
    "draw with the framework's own functions"
)
_REPEATS = 16
"""Number of calls that show whether an output of the source is random. Outputs of few bits can be equal by chance."""

Outputs = Mapping[str, Array]
Progress = Callable[[str], None]


def certify(
    artifact: Artifact,
    source: FrameworkModel,
    exported: Exported,
    options: ConvertOptions,
    seed: int = 0,
    progress: Progress = lambda _: None,
    patience: Patience | None = None,
) -> Certificate:
    """Compare ``artifact`` with ``source``. ``options.sample`` is one of the calls. ``patience`` bounds the time.

    Raises InvalidArgument if the source accepts none of the calls, and InvalidModel if ``artifact`` is not a valid model.
    """
    with np.errstate(all="ignore"):
        return Parity(artifact, source, exported, seed, progress, patience or Patience()).certify(options)


class _Failure(NamedTuple):
    """A call on which the source and the ONNX model differ. Without a ``name``, the model rejects the call."""

    case: Case
    want: Outputs
    reason: str
    name: str = ""
    got: Array | None = None
    difference: OutputDifference = OutputDifference(np.inf)
    is_optimised: bool = False
    divergence: Divergence | None = None
    """The node that is wrong, if it is known."""


class Parity:
    """One comparison of a source with its ONNX model."""

    def __init__(
        self,
        artifact: Artifact,
        source: FrameworkModel,
        exported: Exported,
        seed: int,
        progress: Progress,
        patience: Patience,
    ) -> None:
        self._patience = patience
        self._artifact, self._source, self._exported = artifact, source, exported
        self._nodes, self._seed, self._progress = Nodes(read_proto(artifact)), seed, progress
        meanings = meanings_of(source.signature, read_graph(artifact.data))
        self._maker = Maker(source.signature, source.axes, meanings, seed)
        self._random: set[str] = set()
        self._count = 0
        self._worst: OutputDifference = OutputDifference()
        self._decided: Counter[str] = Counter()
        self._undecided: Counter[str] = Counter()
        """Numbers of calls with plausible values in which the comparison of an output said something, and did not."""
        self._proving: Counter[str] = Counter()
        """Numbers of all calls in which the comparison of an output said something."""
        self._coverage = Coverage(self._nodes)
        self._failures: list[_Failure] = []
        self._parts: tuple[Case, Outputs] | None = None
        """The largest ordinary call, on which the parts of the graph are also compared."""
        self._is_coarse = False
        self._are_parts_proved = False
        self._notes: dict[str, None] = {}
        self._rejection, self._rejected = "", 0
        self._trees = TreeProof()

    def certify(self, options: ConvertOptions) -> Certificate:
        with keep_models(_KEPT_BYTES):
            return self._certify(options)

    def _certify(self, options: ConvertOptions) -> Certificate:
        self._trees = self._proof_of_trees()
        for case, want in self._calls(options):
            if not self._count:
                self._find_random(case, want)
            self._progress(case.label)
            self._compare(case, want)
            if len(self._failures) >= _BLAMED or self._trees.divergence:
                break
        if not self._count:
            raise InvalidArgument(
                f"the source accepts none of the inputs that were tried: {self._rejection}",
                "give one call with --sample FILE.npz, or describe the inputs with --inputs",
            )
        if not self._failures and not self._trees.divergence:
            self._compare_weights(case, want)
        if self._parts and not self._failures and not self._trees.divergence:
            self._compare_parts(*self._parts)
        return self._certificate()

    def _proof_of_trees(self) -> TreeProof:
        if not isinstance(self._source, HasTrees):
            return TreeProof()
        try:
            trees = self._source.trees()
        except PenstockError as error:
            self._notes[f"the trees of the source are unknown: {error.message}"] = None
            return TreeProof()
        graph = self._nodes.proto.graph
        return compare_trees(trees, tree_nodes(graph, self._nodes.constants)) if trees else TreeProof()

    def _compare_parts(self, case: Case, want: Outputs) -> None:
        """Compare every linked tensor, given the source's tensors before it. The outputs hide errors of a part if values are coarse,
        or if the part contributes little, such as a layer with small weights beside a residual connection."""
        if not self._patience.allows(replace(case, label=f"the intermediate values on {case.label}")):
            return
        with self._patience.spending(case):
            blame = self._blamed(case, want)
            if not blame.has_links:
                return
            found = blame.find(only_sure=True)
            self._are_parts_proved = self._is_coarse and blame.proves
            if found is None and self._exported.has_parts and not self._is_coarse:
                found = blame.probe()
            if found is not None:
                reason = f"node '{found.node}' differs from '{found.source}' of the source, given its inputs, on {case.label}"
                self._fail(case, want, reason, found)

    def _compare_weights(self, case: Case, want: Outputs) -> None:
        if (found := altered_weight(self._nodes, self._source, self._exported)) is not None:
            self._fail(case, want, f"{found.where} than '{found.source}' of the source", found)

    def _fail(self, case: Case, want: Outputs, reason: str, found: Divergence) -> None:
        self._failures.append(_Failure(case, want, reason, difference=OutputDifference(found.error), divergence=found))

    def _blamed(self, case: Case, want: Outputs) -> Blame:
        outputs = {name: array for name, array in want.items() if name not in self._random}
        return Blame(self._nodes, self._source, self._exported.links, _copied(case.inputs), outputs)

    def _calls(self, options: ConvertOptions) -> Iterator[tuple[Case, Outputs]]:
        """The calls that the source accepts, with its outputs: small ones first, because they cost less and show as much."""
        given: Shapes = {}
        if options.sample:
            sample = Case("the given sample", {name: np.asarray(array) for name, array in options.sample.items()})
            for found in self._accepted(sample, is_essential=True):
                yield found
                given = {spec.name: found[0].inputs[spec.name].shape for spec in self._source.signature.inputs}
        shapes: Shapes = {}
        for tried in (*self._maker.shapes(), given) if given else self._maker.shapes():
            for found in self._accepted(self._maker.plausible(tried), is_essential=True):
                yield found
                shapes = tried
            if shapes:
                break
        for case in self._probes():
            yield from self._accepted(case, is_essential=True)
        if not shapes:
            return
        for case in (*self._maker.enumerated(shapes), *self._maker.extremes(shapes)):
            yield from self._accepted(case)
        yield from self._resized(shapes)
        yield from self._accepted(self._maker.plausible(self._maker.mixed(shapes)))
        yield from self._long(shapes)
        if given and given != shapes:
            yield from self._accepted(self._maker.plausible(given), is_essential=True)
        for case in (*self._maker.empty(shapes), *self._maker.blank(shapes)):
            yield from self._accepted(case)
        if not self._failures:
            self._remark(shapes)

    def _long(self, shapes: Shapes) -> Iterator[tuple[Case, Outputs]]:
        """Calls that reach the ends of tables, and one over whose rows the rounding of coarse values averages out."""
        for rows in self._coverage.lengths():
            for tried in self._maker.lengths(shapes, rows):
                if rows in self._coverage.lengths():
                    yield from self._accepted(self._maker.plausible(tried))
        for case in self._maker.many(shapes) if self._is_coarse else ():
            yield from self._accepted(case)

    def _remark(self, shapes: Shapes) -> None:
        """Note the outputs that differ for unusual values. The certificate does not depend on these."""
        if self._nodes.has_loop():
            self._notes["not tried with NaN, infinity and huge integers, because loops might never end"] = None
            return
        for case in self._maker.unusual(shapes):
            if not self._patience.allows(case):
                continue
            with contextlib.suppress(PenstockError), self._patience.spending(case):
                want, got = self._source.forward(_copied(case.inputs)), self._run(case, as_written=False)
                names = [name for name in want if name not in self._random and _is_other(want[name], got.get(name))]
                for name in names:
                    self._notes[f"output '{name}' differs from the source's for {case.label}"] = None

    def _probes(self) -> list[Case]:
        if not isinstance(self._source, Probing):
            return []
        try:
            probes = self._source.probes(self._seed, brief=self._trees.is_complete)
        except PenstockError as error:
            self._notes[f"the source's own values are unknown: {error.message}"] = None
            return []
        self._notes |= dict.fromkeys(probes.notes)
        return [
            Case(f"the source's own values {number}", dict(inputs), is_probe=True)
            for number, inputs in enumerate(probes.calls)
        ]

    def _resized(self, shapes: Shapes) -> Iterator[tuple[Case, Outputs]]:
        """Calls with other sizes of one free dimension: first one of each dimension, then a second one."""
        waiting = [iter(others) for _, others in self._maker.sizes(shapes)]
        for _ in range(self._maker.wanted_sizes()):
            for others in waiting:
                found = False
                while not found and (other := next(others, None)) is not None:
                    for accepted in self._accepted(self._maker.plausible(other)):
                        found = True
                        yield accepted

    def _accepted(self, case: Case, *, is_essential: bool = False) -> Iterator[tuple[Case, Outputs]]:
        """``case`` with the source's outputs; nothing if the source rejects it, or if no time is left for it."""
        if not is_essential and not self._patience.allows(case):
            return
        # The time includes that of the comparison, which the caller makes before it asks for the next call.
        with self._patience.spending(case, is_essential=is_essential):
            try:
                want = self._source.forward(_copied(case.inputs))
            except PenstockError as error:
                self._rejection = self._rejection or f"{error.message}, on {case.label}"
                self._rejected += 1
                return
            yield case, want

    def _find_random(self, case: Case, want: Outputs) -> None:
        """Find the outputs of the source that differ if the same call is repeated."""
        indices = self._nodes.random()
        suspects, before = self._nodes.dependent(indices), _generators()
        again = self._source.forward(_copied(case.inputs))
        if draws := _generators() != before:
            self._notes[_DRAWS] = None
        for left in reversed(range(_REPEATS if draws or not suspects.isdisjoint(want) else 1)):
            for name in want:
                if name not in self._random and _differs(want[name], again.get(name)):
                    self._random.add(name)
                    if name not in suspects and _is_other(want[name], again.get(name)):
                        reason = f"output '{name}' is random in the source, but not in the ONNX model, on {case.label}"
                        self._failures.append(_Failure(case, want, reason, name, again.get(name)))
            again = self._source.forward(_copied(case.inputs)) if left else again
        self._find_unsteady(case, want, [name for name in want if name in suspects and name not in self._random])
        for index in indices:
            self._notes[f"node '{self._nodes.label(index)}' gives random values"] = None
        for one in self._exported.random:
            self._notes[f"{one} gives random values"] = None

    def _find_unsteady(self, case: Case, want: Outputs, names: Sequence[str]) -> None:
        """Find outputs that are random in the ONNX model only, as with a Dropout that was exported for training."""
        if not names:
            return
        with contextlib.suppress(PenstockError):  # ``_compare`` makes the same call, and tells its error
            got, again = (self._run(case, as_written=True) for _ in range(2))
            for name in names:
                if _differs(got[name], again[name]):
                    reason = f"output '{name}' changes if the call is repeated, but not in the source, on {case.label}"
                    self._failures.append(_Failure(case, want, reason, name, got[name]))

    def _compare(self, case: Case, want: Outputs) -> None:
        """Compare the outputs of the graph as written, and those of the graph after ONNX Runtime's optimisations."""
        self._count += 1
        names = [name for name in want if name not in self._random]
        links = [link for link in self._exported.links if link.is_compared and case.is_probe]
        if not case.is_empty:
            self._coverage.note(case.inputs)
        rounding = (
            _Unknown(self._nodes, {}, [])
            if case.is_empty
            else RoundingModel(self._nodes, case.inputs, [*names, *(link.tensor for link in links)], self._seed)
        )
        kind = {"is_extreme": case.is_extreme, "is_flat": case.is_flat, "has_ties": case.has_ties}
        for as_written in (True, False):
            try:
                got = self._run(case, as_written=as_written)
            except NotStarted:
                raise
            except PenstockError as error:
                reason = f"on {case.label}, which the source accepts, {error.message}"
                self._failures.append(_Failure(case, want, reason, is_optimised=not as_written))
                return
            for name in names:
                difference = compare(name, want[name], got[name], rounding, **kind) if name in got else _MISSING
                if not difference.reason and got[name].dtype != want[name].dtype and want[name].dtype.kind in "biuf":
                    reason = f"is {got[name].dtype}, but {want[name].dtype} in the source"
                    difference = replace(difference, reason=reason)
                if difference.reason:
                    reason = f"output '{name}' {difference.reason}, on {case.label}"
                    self._failures.append(_Failure(case, want, reason, name, got.get(name), difference, not as_written))
                    return
                self._note(name, difference, case)
                self._proving[name] += difference.decides and not as_written
        is_ordinary = not (case.is_extreme or case.is_flat or case.is_empty)
        is_largest = self._parts is None or _elements(case) > _elements(self._parts[0])
        self._is_coarse = rounding.is_coarse
        if is_ordinary and is_largest:
            self._parts = case, want
        self._compare_inner(case, want, links, rounding)

    def _compare_inner(self, case: Case, want: Outputs, links: Sequence[TensorLink], rounding: RoundingModel) -> None:
        """Compare values that the outputs hide."""
        inner = self._source.values(_copied(case.inputs), [link.source for link in links]) if links else {}
        links = [link for link in links if link.source in inner]
        got = self._nodes.run(case.inputs, [link.tensor for link in links]) if links else {}
        for link in links:
            difference = compare(link.tensor, inner[link.source], got[link.tensor], rounding)
            if difference.reason:
                reason = f"'{link.source}' {difference.reason}, on {case.label}"
                values = {**want, link.tensor: inner[link.source]}
                self._failures.append(_Failure(case, values, reason, link.tensor, got[link.tensor], difference))
                return

    def _run(self, case: Case, *, as_written: bool) -> Outputs:
        if case.is_empty:
            return apart.forward(self._artifact, case.inputs, as_written=as_written)
        with loaded(self._artifact, as_written=as_written) as model:
            return model.forward(case.inputs)

    def _note(self, name: str, difference: OutputDifference, case: Case) -> None:
        if not case.is_extreme and not case.is_empty:
            (self._decided if difference.decides else self._undecided)[name] += 1
        if difference.note:
            self._notes[f"output '{name}': {difference.note}"] = None
        if (difference.decides or not case.is_extreme) and difference.error > self._worst.error:
            self._worst = difference

    def _certificate(self) -> Certificate:
        random = self._random
        names = [spec.name for spec in self._source.signature.outputs if spec.name not in random]
        undecided = (
            [name for name in names if self._decided[name] <= self._undecided[name]]
            if not self._failures and not self._are_parts_proved
            else []
        )
        for name in undecided:
            self._notes[
                f"output '{name}' is not proved: in {self._undecided[name]} of {self._decided[name] + self._undecided[name]} calls "
                "with plausible values it was empty, or rounding could change it completely"
            ] = None
        for table, rows in self._coverage.unread():
            if table not in self._trees.tables:
                self._notes[f"no call reads the rows {shown(rows)} of the table '{table}'"] = None
        if self._rejected:
            self._notes[f"the source rejected {self._rejected} other calls, as in: {self._rejection}"] = None
        if left_out := self._patience.left_out:
            self._notes[f"left out, because the model is slow: {', '.join(left_out)}"] = None
        if not names:
            self._notes["all outputs are random, so that nothing is proved"] = None
        worst, divergence = self._worst, self._trees.divergence
        if self._failures and not divergence:
            worst, divergence = self._blame()
        return Certificate(
            holds=not self._failures and not divergence and bool(names) and not undecided,
            cases=self._count,
            max_error=worst.error,
            tolerance=worst.tolerance,
            first_divergent=divergence,
            not_compared=tuple(sorted(random)),
            not_proved=tuple(undecided),
            proved=tuple(Proof(name, self._proving[name], self._count) for name in names),
            trees=self._trees.trees,
            notes=tuple(self._notes),
            exporter=self._exported.exporter,
        )

    def _blame(self) -> tuple[OutputDifference, Divergence]:
        first = self._failures[0]
        self._notes[first.reason] = None
        if first.divergence:
            return first.difference, first.divergence
        if first.is_optimised:
            self._notes["the graph as written agrees with the source; ONNX Runtime's graph optimisations change it"] = (
                None
            )
            return first.difference, Divergence(
                "ONNX Runtime's graph optimisations", first.name, first.difference.error
            )
        for failure in self._failures:
            blame = self._blamed(failure.case, failure.want)
            if not blame.has_links:
                self._notes["the source gives no intermediate values, so that the first divergent node is unknown"] = (
                    None
                )
                break
            if (found := blame.find()) is not None:
                return first.difference, found
        else:
            self._notes["no single node differs beyond rounding"] = None
        if not first.name:
            return first.difference, of_failure(self._nodes, self._exported.links, first.case.inputs, first.reason)
        return first.difference, of_output(self._nodes, first.name, first.want[first.name], first.got, first.difference)


class _Unknown(RoundingModel):
    """Of calls with empty tensors, on which a kernel may end the process: only differences without rounding are compared."""

    def exact(self, name: str) -> None:
        return None

    def noisy(self, name: str, *, stepped: bool = False, count: int = 0) -> list[Array]:
        return []


def _generators() -> tuple[object, ...]:
    """The states of the generators of this process that exporters do not see."""
    _, key, *rest = np.random.get_state()
    return random.getstate(), np.asarray(key).tobytes(), *rest


def _copied(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Copies, because some models change their inputs."""
    return {name: array.copy() for name, array in inputs.items()}


def _elements(case: Case) -> int:
    return sum(array.size for array in case.inputs.values())


def _is_other(want: Array, got: Array | None) -> bool:
    """True if ``got`` differs from ``want`` roughly, or is not finite in other places."""
    if got is None or want.shape != got.shape:
        return True
    if want.dtype.kind != "f":
        return _differs(want, got)
    return not np.allclose(
        want, got, rtol=1e-2, atol=1e-3 * np.abs(want[np.isfinite(want)]).max(initial=0.0), equal_nan=True
    )


def _differs(one: Array, other: Array | None) -> bool:
    if other is None or one.shape != other.shape:
        return True
    with contextlib.suppress(TypeError):
        return not np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return not np.array_equal(one, other)
