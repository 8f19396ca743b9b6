"""Structured pruning: remove channels and attention heads, which leaves a smaller dense model that is faster on any engine.

``narrow`` cuts without training, which costs accuracy. ``recovery.py`` trains as well.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import onnx

from penstock.artifact import Artifact
from penstock.dataset import Dataset, SizedCall
from penstock.errors import InvalidData, PenstockError, Unsupported
from penstock.offline.compress.options import Count, Options, Share
from penstock.offline.compress.pruning.structured.cut import Kept, Structure
from penstock.offline.compress.pruning.structured.importance import Scores, importance
from penstock.offline.compress.pruning.structured.latency import LatencyTable
from penstock.offline.compress.pruning.structured.norms import refresh_norms
from penstock.offline.compress.pruning.structured.widths import (
    Grid,
    best_units,
    fastest_for_least,
    make_grid,
    uniform,
)
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.judge.race import race
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.samples import free_sizes, generate
from penstock.offline.sessions import loaded
from penstock.perf.measure import speedup
from penstock.tensor import Array

_ROUNDS = 4
"""Maximum number of searches. If the model is slower than its layers' times predict, the next search has a lower goal."""
_MEASURE_S = 1.0


class CutOptions(Options, frozen=True, kw_only=True):
    """What may be cut, and the threads for measuring latency."""

    block: Count = 16
    """Widths are multiples of this number of channels. 16 suits AVX-512; 8 suits AVX2 and NEON. Narrow groups use smaller steps."""
    heads: bool = True
    """Cut attention heads as well as channels."""
    exact: bool = True
    """Do not cut channels that a LayerNormalization or a mean includes, since such a cut changes other results."""
    threads: Count = 1
    """Number of threads for measuring latency."""


class NarrowOptions(CutOptions, frozen=True, kw_only=True):
    """The width after the cut, and the choice of units."""

    width: Share = 0.75
    """Fraction of units to keep in each group. With ``speedup``, the maximum fraction: 1 allows groups to stay uncut."""
    speedup: Annotated[float, msgspec.Meta(gt=1)] | None = None
    """Required speed-up of the model with one sample per call. The width of each group is then chosen by measured latency."""
    importance: Literal["norm", "batch-norm", "activation"] = "norm"
    """Measure by which units are ranked; see ``importance.py``. ``activation`` needs data."""
    least: Share = 0.25
    """With ``speedup``: minimum fraction of units to keep in a group."""


def narrow(
    artifact: Artifact,
    options: NarrowOptions = NarrowOptions(),  # noqa: B008 - frozen
    data: Dataset | None = None,
    *,
    scores: Scores | None = None,
    on_progress: Progress = no_progress,
) -> Artifact:
    """Return ``artifact`` without its least important channels and heads.

    The statistics of BatchNormalization are recomputed on ``data``, without labels, since outdated statistics cause most of the
    immediate loss after a cut. ``scores``, for example from ``taylor.by_taylor``, replace ``options.importance``. With ``speedup``,
    the result depends on measured times; otherwise it is deterministic. The provenance step records the number of units of each group,
    and the number of parameters, before and after the cut. Raises InvalidConfig, InvalidModel; InvalidData if the importance needs
    data; Unsupported if nothing can be cut, or if the speed-up is not reached.
    """
    options.check()
    structure = Structure(artifact, exact=options.exact)
    least = 0.0 if options.speedup is None else options.least
    names = cuttable(structure, heads=options.heads)
    grids = {name: make_grid(structure.group(name), options.block, least) for name in names}
    scores = scores or importance(structure, options.importance, data, options.threads, on_progress)
    if options.speedup is None:
        counts = uniform(structure, grids, options.width)
        made = apply(structure, best_units(structure, scores, counts), "narrow", options)
    else:
        made = _fast_enough(structure, scores, grids, options, probe(artifact, data))
    return made if data is None else refresh_norms(made, data, threads=options.threads)


def cuttable(structure: Structure, *, heads: bool = True) -> list[str]:
    """The groups that can be cut. If there are none, raises Unsupported, whose message gives the reasons."""
    names = [group.name for group in structure.groups if group.cuttable and (heads or group.unit_size == 1)]
    if not names:
        reasons = "; ".join(dict.fromkeys(group.reason for group in structure.groups if group.reason))
        raise Unsupported(
            f"no channels of the model can be cut: {reasons or 'it has no layers with constant weights'}",
            "give a model with inner layers whose channels can be cut, or set weights to zero with penstock prune"
            if reasons and "not constant" not in reasons
            else "prune before quantisation, and export with constant weights",
        )
    return names


def apply(structure: Structure, kept: Kept, step: str, options: msgspec.Struct, **facts: object) -> Artifact:
    """Cut channels, and check that the new model loads and keeps its output shapes. If this check fails, Penstock has a bug."""
    origin = structure.artifact
    cut = structure.cut(kept)
    groups = {name: [structure.group(name).units, len(numbers)] for name, numbers in kept.items()}
    about = {"groups": groups, "parameters": [_parameters(origin), _parameters(cut)], **facts}
    made = origin.derive(cut, step, msgspec.to_builtins(options), about)
    sample = probe(origin)
    before, after = _answer_shapes(origin, sample), _answer_shapes(made, sample)
    if before != after:
        raise PenstockError(f"after the cut, the outputs have shapes {after}, but the original's have {before}")
    return made


def probe(artifact: Artifact, data: Dataset | None = None) -> dict[str, Array]:
    """A batch of the smallest possible size, from ``data`` or from generated inputs. Raises InvalidData if the model rejects all
    generated inputs.
    """
    with loaded(artifact) as model:
        rows = model.signature.smallest_batch
        if data is not None:
            return data.call(rows)
        for size in free_sizes(model.signature):
            for sample in generate(model.signature, size):
                with contextlib.suppress(PenstockError):
                    model.forward(sample)
                    return dict(sample)
    raise InvalidData("the model rejects every generated input", "give data")


def _fast_enough(
    structure: Structure, scores: Scores, grids: Mapping[str, Grid], options: NarrowOptions, sample: dict[str, Array]
) -> Artifact:
    """Narrow the layers until the measured speed-up of the whole model is reached."""
    assert options.speedup is not None
    table = LatencyTable(structure, sample, options.threads)
    widest = uniform(structure, grids, options.width)
    (full,) = table.totals([{}])
    goal, found = full / options.speedup, 1.0
    for _ in range(_ROUNDS):
        counts, promised = fastest_for_least(structure, scores, table, widest, goal, grids)
        kept = best_units(structure, scores, counts)
        made = apply(structure, kept, "narrow", options, layers_ms=[round(full, 4), round(promised, 4)])
        found = measured_speedup(structure.artifact, made, sample, options.threads)
        if found >= options.speedup or promised > goal:
            break
        goal *= 0.97 * found / options.speedup
    if found < options.speedup:
        raise Unsupported(
            f"the model becomes {found:.2f} times faster, not {options.speedup:g} times",
            f"ask for a lower speed-up; every group keeps at least {options.least:.0%} of its units",
        )
    return made


def measured_speedup(before: Artifact, after: Artifact, sample: Mapping[str, Array], threads: int) -> float:
    """The speed-up of ``after`` over ``before`` on ``sample``, from interleaved calls."""
    timings = race({"before": before, "after": after}, [SizedCall(dict(sample))], _MEASURE_S, threads)
    return speedup(timings["before"], timings["after"]).value


def _answer_shapes(artifact: Artifact, sample: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    read_proto(artifact)  # checks the model
    with loaded(artifact) as model:
        return {name: array.shape for name, array in model.forward(sample).items()}


def _parameters(artifact: Artifact) -> int:
    """The number of elements in all float initialisers."""
    tensors = onnx.load_model_from_string(artifact.data).graph.initializer
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
    return sum(math.prod(tensor.dims) for tensor in tensors if tensor.data_type in floats)
