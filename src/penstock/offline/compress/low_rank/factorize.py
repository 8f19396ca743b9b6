"""Split the slow layers of a model into low-rank factors, within a bound on the error of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.dataset import Dataset, SizedCall
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.compress.low_rank import convolution, rank_choice
from penstock.offline.compress.low_rank.convolution import WHOLE, SplitForm, Way
from penstock.offline.compress.low_rank.layers import SplittableLayer, layers, measure, replace
from penstock.offline.compress.low_rank.matrix import Decomposition, Moments, Split, decompose
from penstock.offline.compress.low_rank.rank_choice import RankChoice
from penstock.offline.compress.options import Count, NotNegative, Options, Part
from penstock.offline.compress.taps import Progress, Taps, no_progress
from penstock.offline.judge.accuracy import answers_of
from penstock.offline.judge.metrics import Outputs, sample_errors
from penstock.offline.judge.race import race
from penstock.offline.optimize.model import from_proto, read_proto, to_artifact
from penstock.tensor import Array

Accept = Callable[[Artifact], bool]

_MODEL_SECONDS = 1.0
_ROWS = 4096
"""Number of evenly spaced rows of each batch that a tensor's moments include. Neighbouring pixels are nearly redundant."""


class FactorizeOptions(Options, frozen=True):
    """Options of the split."""

    max_error: Part = 0.05
    """Maximum mean relative error of the outputs on the data."""
    target_speedup: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Stop when the measured times of the layers predict this speed-up of the whole model."""
    rank: int | None = None
    """Rank of every matrix product, used without timing. A layer stays unsplit if this rank does not make it cheaper."""
    forms: tuple[str, ...] = ("channel", "spatial", "tucker")
    """Forms of split to consider for convolutions. Matrix products always use the form ``channel``."""
    aware: bool = True
    """If true, minimise the change of each layer's results on the data; if false, minimise the change of its weights."""
    min_ms: NotNegative = 0.05
    """Skip layers that take fewer milliseconds than this: the extra operator would take as much time as the split saves."""
    rows: Count = 1
    """Number of samples in a timed call; choose the batch size of serving."""
    samples: Count = 64
    """Number of samples at the end of the data for measuring the error. If possible, the moments exclude these samples."""
    batch_size: Count = 32
    threads: Count = 1


_DEFAULTS = FactorizeOptions()


def factorize(
    artifact: Artifact,
    data: Dataset,
    options: FactorizeOptions = _DEFAULTS,
    *,
    accept: Accept | None = None,
    progress: Progress = no_progress,
) -> Artifact:
    """Split Gemm, MatMul and Conv layers of ``artifact`` (FP32) if that saves measured time and keeps the error within ``max_error``.

    If ``accept`` is given, it decides whether a model is good enough, instead of ``max_error``. The result depends on measured times,
    which the provenance step records (``facts``); with a fixed ``rank``, it is deterministic. ``training.distill.recover`` can restore
    accuracy afterwards. Raises Unsupported if no layer can be split or none becomes faster; InvalidArgument for a ``rank`` that makes
    no layer cheaper; InvalidData if the data do not fit.
    """
    options.check()
    known = {form.value for form in SplitForm}
    if unknown := sorted(set(options.forms) - known):
        raise InvalidArgument(f"unknown forms {unknown}", f"choose from {sorted(known)}")
    factory = _Factory(artifact, data, options, progress)
    if options.rank is None:
        assignment, facts = factory.choose(accept)
    else:
        assignment, facts = factory.at_rank(options.rank), {}
    found = factory.build(assignment)
    facts["error"] = factory.error(found)
    facts["layers"] = {name: factory.splitter.describe(name, way) for name, way in assignment.items()}
    asked = {**msgspec.structs.asdict(options), "data": data.digest}
    return artifact.derive(found, "factorize", asked, facts)


class _Factory:
    """Splits some layers of one model, and measures the result."""

    def __init__(self, artifact: Artifact, data: Dataset, options: FactorizeOptions, progress: Progress) -> None:
        self._proto = read_proto(artifact)
        self._options = options
        self.layers = {layer.name: layer for layer in layers(self._model())}
        if not self.layers:
            if any(node.op_type == "DequantizeLinear" for node in self._proto.graph.node):
                raise Unsupported("the model is already quantised", "give the float model, and quantise afterwards")
            needs = "low-rank factorisation needs Gemm, MatMul or Conv with constant FP32 weights"
            raise Unsupported("the model has no layer to split", needs)
        self._artifact = artifact
        self._taps = Taps(artifact, data, batch_size=options.batch_size, threads=options.threads)
        fit, self._held_out = _parts(data, options.samples, self._taps.batches.smallest)
        self._reference = self._answers(artifact)
        self.splitter = Splitter(self.layers)
        if options.aware:
            self.splitter.observe(Taps(artifact, fit, batch_size=options.batch_size, threads=options.threads), progress)

    def at_rank(self, rank: int) -> dict[str, Way]:
        """Split every matrix product that needs fewer multiplications at ``rank``."""
        limits = {name: break_even(layer.weight.shape) for name, layer in self.layers.items() if not layer.kernel}
        if not any(0 < rank < limit for limit in limits.values()):
            shown = {name: round(limit, 1) for name, limit in limits.items()}
            raise InvalidArgument(
                f"rank {rank} makes no matrix product cheaper", f"give less than mn / (m + n): {shown}"
            )
        return {name: (SplitForm.CHANNEL, (rank,)) for name, limit in limits.items() if 0 < rank < limit}

    def choose(self, accept: Accept | None) -> tuple[dict[str, Way], dict[str, Any]]:
        """Choose the fastest set of splits on the path that is accepted. Also returns the facts for the provenance step."""
        times, whole_ms = self._times()
        frontiers = {name: rank_choice.frontier(self._choices(name, times[name])) for name in times}
        if all(len(choices) == 1 for choices in frontiers.values()):
            raise Unsupported("no layer becomes faster by being split", "use a larger model, or more rows in a call")
        stops = [
            {name: choices[place] for (name, choices), place in zip(frontiers.items(), places, strict=True)}
            for places in rank_choice.path(list(frontiers.values()))
        ]

        def assignment(stop: int) -> dict[str, Way]:
            return {name: (at.form, at.ranks) for name, at in stops[stop].items() if at.form is not None}

        def promised(stop: int) -> float:
            saved = sum(times[name][WHOLE] - at.ms for name, at in stops[stop].items())
            return whole_ms / max(whole_ms - saved, 1e-6)

        def accepted(stop: int) -> bool:
            found = self.build(assignment(stop))
            return accept(found) if accept is not None else self.error(found) <= self._options.max_error

        enough = self._options.target_speedup or float("inf")
        count = next((stop + 1 for stop in range(len(stops)) if promised(stop) >= enough), len(stops))
        stop = rank_choice.furthest(count, accepted)
        table = {
            name: {
                " ".join([form.value if form else "whole", *map(str, at)]): round(ms, 5)
                for (form, at), ms in ways.items()
            }
            for name, ways in times.items()
        }
        promise = round(promised(stop), 3)
        return assignment(stop), {
            "promised_speedup": promise,
            "ms": whole_ms,
            "stop": [stop, count - 1],
            "table": table,
        }

    def build(self, assignment: Mapping[str, Way]) -> Artifact:
        """The model with the layers in ``assignment`` (by name) split."""
        model = self._model()
        here = {layer.name: layer for layer in layers(model)}
        for name, (form, ranks) in assignment.items():
            if form is not None:
                replace(here[name], form, self.splitter.split(name, form, ranks))
        return to_artifact(model)

    def error(self, found: Artifact) -> float:
        """Mean relative error of the outputs on the held-out samples."""
        return float(sample_errors(self._reference, self._answers(found)).mean())

    def _choices(self, name: str, times: Mapping[Way, float]) -> list[RankChoice]:
        """All timed ways to run the layer ``name``, with their estimated errors. One trial model for each form of split gives the
        ratio of the outputs' error to the layer's error.
        """
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
        """Milliseconds of every way to run each slow layer, and of the whole model. Layers of equal shape are timed once."""
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
                f"all layers that can be split take less than {self._options.min_ms} ms",
                "use a larger model, or give a lower --min-ms (in Python min_ms)",
            )
        call = SizedCall(self._taps.sample(self._options.rows))
        whole = race({"": self._artifact}, [call], _MODEL_SECONDS, self._options.threads, loads=1)
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
        return from_proto(self._proto)

    def _answers(self, artifact: Artifact) -> Outputs:
        return answers_of(artifact, self._held_out, self._options.threads, batch_size=self._options.batch_size)


class Splitter:
    """Splits layers. Uses the moments that ``observe`` collected or, without moments, the weights alone.

    Memory: 8 · min(outputs, inputs)² bytes per layer for moments, and 16 bytes per weight for cached decompositions. A convolution
    needs 8 · (outputs² + inputs²) bytes for moments.
    """

    def __init__(self, layers: Mapping[str, SplittableLayer]) -> None:
        self._layers = layers
        self._results: dict[str, Moments] = {}
        self._sources: dict[tuple[str, int], Moments] = {}
        self._decompositions: dict[tuple[str, SplitForm], Decomposition] = {}
        self._errors: dict[tuple[str, Way], float] = {}

    def observe(self, taps: Taps, progress: Progress) -> None:
        """Collect moments of the input or output of each layer, whichever has fewer channels. For convolutions, collect both."""
        wanted: dict[str, list[tuple[Moments, int, Array | None]]] = {}
        for layer in self._layers.values():
            outputs, inputs, *kernel = layer.weight.shape
            if kernel or outputs <= inputs:
                moments = self._results[layer.name] = Moments(outputs)
                wanted.setdefault(layer.name, []).append((moments, layer.axis, layer.bias))
            if (kernel or outputs > inputs) and (layer.source, layer.axis) not in self._sources:
                moments = self._sources[layer.source, layer.axis] = Moments(inputs)
                wanted.setdefault(layer.source, []).append((moments, layer.axis, None))
        for name, array in taps.run(list(wanted), progress):
            for moments, axis, bias in wanted[name]:
                rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
                rows = rows[:: max(1, len(rows) // _ROWS)]
                moments.update(rows if bias is None else rows - bias)

    def split(self, name: str, form: SplitForm, ranks: tuple[int, ...]) -> Split:
        """The factors of the layer ``name``."""
        return self._find(name, form, ranks)[0]

    def error(self, name: str, form: SplitForm, ranks: tuple[int, ...]) -> float:
        """Estimated relative error of the layer's results or, without moments, of its weights."""
        key = (name, (form, ranks))
        if key not in self._errors:
            self._errors[key] = self._find(name, form, ranks)[1]
        return self._errors[key]

    def _find(self, name: str, form: SplitForm, ranks: tuple[int, ...]) -> tuple[Split, float]:
        layer = self._layers[name]
        if form is SplitForm.TUCKER:
            inputs, results = self._sources.get((layer.source, layer.axis)), self._results.get(name)
            return convolution.tucker(layer.weight, (ranks[0], ranks[1]), inputs, results)
        found, (rank,) = self._decomposition(name, form), ranks
        if form is SplitForm.SPATIAL:
            return convolution.spatial_split(found, rank, layer.weight.shape), found.error(rank)
        return found.at(rank, layer.kernel), found.error(rank)

    def describe(self, name: str, way: Way) -> dict[str, Any]:
        form, ranks = way
        assert form is not None
        layer = self._layers[name]
        return {
            "form": form.value,
            "ranks": list(ranks),
            "shape": list(layer.weight.shape),
            "weights": round(convolution.products(layer.weight.shape, form, ranks) / layer.weight.size, 4),
            "error": round(self.error(name, form, ranks), 6),
        }

    def _decomposition(self, name: str, form: SplitForm) -> Decomposition:
        if (name, form) not in self._decompositions:
            layer = self._layers[name]
            outputs, inputs, *kernel = layer.weight.shape
            if form is SplitForm.SPATIAL:
                found = convolution.spatial(layer.weight, self._sources.get((layer.source, layer.axis)))
            else:
                of_results = bool(kernel) or outputs <= inputs
                moments = self._results.get(name) if of_results else self._sources.get((layer.source, layer.axis))
                matrix = layer.weight.reshape(outputs, -1)
                found = decompose(matrix, moments, of_results=of_results, centred=layer.bias is not None)
            self._decompositions[name, form] = found
        return self._decompositions[name, form]


def break_even(shape: tuple[int, ...]) -> float:
    """The rank at which splitting an (outputs, inputs) weight saves nothing: two products need as many multiplications as one."""
    return shape[0] * shape[1] / (shape[0] + shape[1])


def _parts(data: Dataset, samples: int, multiple: int) -> tuple[Dataset, Dataset]:
    """Samples for the moments, and the last ``samples`` samples for judging. The parts overlap if there are too few samples."""
    held_out = max(multiple, samples - samples % multiple)
    if data.count < 2 * held_out:
        return data, data.part(0, held_out)
    at = data.count - held_out
    return data.part(0, at), data.part(at, data.count)
