"""Split the heavy layers of a model into thinner ones, within an error of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.compress.low_rank import convolution, rank_choice
from penstock.offline.compress.low_rank.convolution import SplitForm
from penstock.offline.compress.low_rank.layers import SplittableLayer, layers, replace
from penstock.offline.compress.low_rank.rank_choice import RankChoice
from penstock.offline.compress.low_rank.splitter import Splitter
from penstock.offline.compress.low_rank.timing import WHOLE, Way, measure
from penstock.offline.compress.taps import Progress, Taps, no_progress
from penstock.offline.judge.accuracy import answers_of
from penstock.offline.judge.metrics import Outputs, sample_errors
from penstock.offline.judge.race import race
from penstock.offline.optimize.model import read_proto, to_bytes

Accept = Callable[[Artifact], bool]
Assignment = Mapping[str, Way]
"""How to run each layer, by name; those left out stay whole."""

_MODEL_SECONDS = 1.0


class FactorizeOptions(msgspec.Struct, frozen=True):
    """How to split layers."""

    max_error: float = 0.05
    """Mean relative error of the outputs on the data, 0 to 1, up to which layers are made thinner."""
    target_speedup: float | None = None
    """Stop as soon as the times of the layers promise this much for the whole model."""
    rank: int | None = None
    """This rank for every matrix product and no choice, no timing; layers that it would not make cheaper stay whole."""
    forms: tuple[str, ...] = ("channel", "spatial", "tucker")
    """The ways to split a convolution that may be chosen; matrix products know "channel" only."""
    aware: bool = True
    """By the data's moments: the least change of results. Otherwise of weights."""
    min_ms: float = 0.05
    """Layers that take less are left alone: a second call costs as much as it saves."""
    rows: int = 1
    """Samples in one call, as the model will be served."""
    samples: int = 64
    """Samples on which errors of the outputs are measured, the last of the data; all others give the moments, if there are more."""
    batch_size: int = 32
    threads: int = 1


_DEFAULTS = FactorizeOptions()


def factorize(
    artifact: Artifact,
    data: Dataset,
    options: FactorizeOptions = _DEFAULTS,
    *,
    accept: Accept | None = None,
    progress: Progress = no_progress,
) -> Artifact:
    """``artifact`` (FP32) with Gemm, MatMul and Conv split wherever that saves measured time within ``max_error``.

    ``accept`` decides in place of ``max_error``. The choice rests on times taken here; the facts hold them. With a
    ``rank`` the same arguments give the same bytes. Fine-tuning afterwards wins back accuracy: ``training.distill.recover``.
    Raises Unsupported if no layer can be split or none becomes faster, InvalidArgument for a ``rank`` from which no layer gains,
    InvalidData if the data do not fit.
    """
    known = {form.value for form in SplitForm}
    if not set(options.forms) <= known or not 0 <= options.max_error <= 1 or min(options.rows, options.samples) < 1:
        raise InvalidArgument(
            "rows and samples are at least 1, max_error is from 0 to 1, and the forms are those known",
            f"give forms out of {sorted(known)}",
        )
    factory = _Factory(artifact, data, options, progress)
    if options.rank is not None:
        assignment = factory.at_rank(options.rank)
        facts: dict[str, Any] = {}
    else:
        assignment, facts = factory.choose(accept)
    found = factory.build(assignment)
    facts |= {
        "error": factory.error(found),
        "layers": {name: factory.splitter.describe(name, way) for name, way in assignment.items()},
    }
    asked = {**msgspec.structs.asdict(options), "data": data.digest}
    return artifact.derive(found.data, "factorize", asked, facts)


class _Factory:
    """One model, the statistics of its layers, and variants of it with layers split."""

    def __init__(self, artifact: Artifact, data: Dataset, options: FactorizeOptions, progress: Progress) -> None:
        self._proto = read_proto(artifact)
        self._options = options
        self.layers = {layer.name: layer for layer in layers(self._model())}
        if not self.layers:
            if any(node.op_type == "DequantizeLinear" for node in self._proto.graph.node):
                raise Unsupported("the model is quantised already", "give the float model, and quantise after")
            needs = "low rank needs Gemm, MatMul or Conv with constant FP32 weights"
            raise Unsupported("the model has no layer to split", needs)
        self._artifact = artifact
        self._taps = Taps(artifact, data, batch_size=options.batch_size, threads=options.threads)
        fit, self._held_out = _parts(data, options.samples, self._taps.batches.smallest)
        self._reference = self._answers(artifact)
        self.splitter = Splitter(self.layers)
        if options.aware:
            taps = Taps(artifact, fit, batch_size=options.batch_size, threads=options.threads)
            self.splitter.observe(taps, progress)

    def at_rank(self, rank: int) -> dict[str, Way]:
        way: Way = (SplitForm.CHANNEL, (rank,))
        products = {name: layer for name, layer in self.layers.items() if not layer.kernel}
        gains = {name: way for name, layer in products.items() if 0 < rank < break_even(layer.weight.shape)}
        if not gains:
            limits = {name: round(break_even(layer.weight.shape), 1) for name, layer in products.items()}
            raise InvalidArgument(f"rank {rank} makes no product cheaper", f"give less than mn / (m + n): {limits}")
        return gains

    def choose(self, accept: Accept | None) -> tuple[dict[str, Way], dict[str, Any]]:
        """The last accepted stop on the path of cheapest steps, and its promised speed-up."""
        times, whole_ms = self._times()
        names = list(times)
        options = [rank_choice.frontier(self._choices(name, times[name])) for name in names]
        if not any(len(choices) > 1 for choices in options):
            raise Unsupported("no layer becomes faster by being split", "give a larger model, or more rows in a call")
        stops = rank_choice.path(options)

        def chosen(stop: int) -> list[RankChoice]:
            return [choices[at] for choices, at in zip(options, stops[stop], strict=True)]

        def assignment(stop: int) -> dict[str, Way]:
            return {
                name: (at.form, at.ranks) for name, at in zip(names, chosen(stop), strict=True) if at.form is not None
            }

        def promised(stop: int) -> float:
            saved = sum(choices[0].ms - at.ms for choices, at in zip(options, chosen(stop), strict=True))
            return whole_ms / max(whole_ms - saved, 1e-6)

        enough = self._options.target_speedup or float("inf")
        count = next((stop + 1 for stop in range(len(stops)) if promised(stop) >= enough), len(stops))

        def accepted(stop: int) -> bool:
            found = self.build(assignment(stop))
            return accept(found) if accept is not None else self.error(found) <= self._options.max_error

        stop = rank_choice.furthest(count, accepted)
        facts = {"promised_speedup": round(promised(stop), 3), "ms": whole_ms, "stop": [stop, count - 1]}
        return assignment(stop), facts | {"table": _table(times)}

    def build(self, assignment: Assignment) -> Artifact:
        """The model with those layers split."""
        model = self._model()
        here = {layer.name: layer for layer in layers(model)}
        for name, (form, ranks) in assignment.items():
            if form is not None:
                replace(here[name], form, self.splitter.split(name, form, ranks))
        return Artifact.from_bytes(to_bytes(model))

    def error(self, found: Artifact) -> float:
        """Mean relative error of the outputs on the samples held out."""
        return float(sample_errors(self._reference, self._answers(found)).mean())

    def _choices(self, name: str, times: Mapping[Way, float]) -> list[RankChoice]:
        """All timed ways with their errors. For each form one trial model relates the layer's error to that of the outputs."""
        found = [RankChoice(times[WHOLE], 0.0)]
        for form in dict.fromkeys(form for form, _ in times if form is not None):
            ways = [way for way in times if way[0] is form and times[way] < times[WHOLE]]
            if not ways:
                continue
            probe = ways[len(ways) // 2]
            local = max(self.splitter.error(name, form, probe[1]), 1e-9)
            gain = (self.error(self.build({name: probe})) / local) ** 2
            found += [RankChoice(times[way], gain * self.splitter.error(name, form, way[1]) ** 2, *way) for way in ways]
        return found

    def _times(self) -> tuple[dict[str, dict[Way, float]], float]:
        """Milliseconds of every way to run each layer that is worth it, once for each distinct shape, and of the whole model."""
        shapes = self._taps.shapes([layer.source for layer in self.layers.values()], self._options.rows)
        known: dict[tuple[Any, ...], dict[Way, float]] = {}
        found: dict[str, dict[Way, float]] = {}
        for name, layer in self.layers.items():
            key = (layer.node.op_type, str(layer.node.attributes), layer.weight.shape, shapes[layer.source])
            if key not in known:
                known[key] = self._measure(layer, shapes[layer.source])
            if len(known[key]) > 1:
                found[name] = known[key]
        if not found:
            raise Unsupported(
                f"no layer that can be split takes {self._options.min_ms} ms",
                "it pays in larger layers; or give a lower --min-ms (in Python min_ms)",
            )
        whole = race({"": self._artifact}, self._taps.sample(self._options.rows), _MODEL_SECONDS, self._options.threads)
        return found, whole[""].p50_ms

    def _measure(self, layer: SplittableLayer, shape: tuple[int, ...]) -> dict[Way, float]:
        whole = measure(layer, shape, [WHOLE], self._options.threads)
        if whole[WHOLE] < self._options.min_ms:
            return whole
        ways: list[Way] = [WHOLE]
        for form in convolution.forms(layer.kernel):
            if not layer.kernel or form.value in self._options.forms:
                ways += [(form, ranks) for ranks in convolution.rank_choices(layer.weight.shape, form)]
        return measure(layer, shape, ways, self._options.threads)

    def _model(self) -> ir.Model:
        model: ir.Model = ir.from_proto(self._proto)
        return model

    def _answers(self, artifact: Artifact) -> Outputs:
        return answers_of(artifact, self._held_out, self._options.threads, batch_size=self._options.batch_size)


def break_even(shape: tuple[int, ...]) -> float:
    """The rank from which two products of an (outputs, inputs) weight multiply as much as one."""
    return shape[0] * shape[1] / (shape[0] + shape[1])


def _parts(data: Dataset, samples: int, multiple: int) -> tuple[Dataset, Dataset]:
    """Samples for the moments, and the last ``samples`` for judging; the same if there are too few for both."""
    held_out = max(multiple, samples - samples % multiple)
    if data.count < 2 * held_out:
        return data, make_dataset(data.rows(0, min(data.count, held_out)), None)
    return make_dataset(data.rows(0, data.count - held_out), None), make_dataset(
        data.rows(data.count - held_out, data.count), None
    )


def _table(times: Mapping[str, Mapping[Way, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            " ".join([form.value if form else "whole", *map(str, ranks)]): round(ms, 5)
            for (form, ranks), ms in ways.items()
        }
        for name, ways in times.items()
    }
