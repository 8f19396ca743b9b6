"""Cross-layer equalisation: the channels of every tensor between two products are brought to like ranges, so that one scale
a tensor suits them all. The float model computes the same as before.

M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, §4.1: channel i of the
tensor between weights W1 and W2 is divided by s_i = sqrt(r1_i / r2_i), r being the largest magnitudes of the rows of W1 and the
columns of W2; pair after pair until nothing moves, which for pointwise, depthwise, pointwise is the paper's formula for
three layers. Weights that have a scale for each output channel no longer need that; activations, which have one a tensor, do:
with data r1_i is what the channel itself reaches.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.compress.ptq.rescale import Link, Rescaling
from penstock.offline.compress.taps import Progress, Taps, no_progress
from penstock.offline.optimize import graph
from penstock.offline.optimize.model import infer_shapes, read_proto
from penstock.offline.optimize.verify import Verifier, compare
from penstock.offline.sessions import call_rows, loaded, signature_of
from penstock.tensor import Array

_LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_DEAD = 1e-6
"""A channel smaller than this share of the largest counts as this large: it has nothing to equalise."""
_CHECKED_ROWS = 64
# Scales are powers of two where exact; otherwise each is rounded into the weights once, some units of 6e-8 a layer.
_TOLERANCE = 1e-5


class EqualizeOptions(msgspec.Struct, frozen=True):
    """How to equalise."""

    alpha: float = 0.5
    """Share of the tensor's uneven ranges that its readers' weights take over, 0 to 1: s = r1^alpha / r2^(1 - alpha)."""
    exact: bool = True
    """Round scales to powers of two: every product in the model then has the very same bits as before."""
    limit: float = 1e4
    """No channel is scaled by more than this, or less than its inverse."""
    max_saturation: float = 0.0
    """Share of values that may lie above a Clip's bound (ReLU6) on the data if it is to become a Relu; that changes answers."""
    max_sweeps: int = 50
    batch_size: int = 32
    threads: int = 1


_DEFAULTS = EqualizeOptions()


def equalize(
    artifact: Artifact,
    data: Dataset | None = None,
    options: EqualizeOptions = _DEFAULTS,
    progress: Progress = no_progress,
) -> Artifact:
    """The same function with channels of like ranges, to be quantised. ``artifact`` is FP32, BatchNormalization folded.

    With ``data`` by the ranges of activations, without by those of weights. A Clip from 0 (ReLU6) is passed only with data that
    never reach its bound, and then becomes a Relu. Tensors that branch, other than to products alone, stay as they are.
    Raises InvalidModel, Unsupported if the model cannot be read or holds BatchNormalization, InvalidData if the data do not fit.
    """
    if not (0 <= options.alpha <= 1 and options.limit >= 1):
        raise InvalidArgument("equalisation needs an alpha from 0 to 1 and a limit of at least 1")
    model = infer_shapes(read_proto(artifact))
    if any(node.op_type == "BatchNormalization" for node in model.graph):
        raise Unsupported("BatchNormalization stands between the layers to equalise", "fold it first, with optimize()")
    rescaling = Rescaling(model)
    links = [link for link in rescaling.links if link.writer.op_type in _LINEAR]
    reached, saturation = _observe(artifact, links, data, options, progress)
    links = [
        link for link in links if all(saturation[_tensor(clip)] <= options.max_saturation for clip, _ in link.clips)
    ]
    totals, sweeps = _settle(links, reached, options)
    rescaling.restore()
    for link in links:
        link.rescale(totals[link.name])
    clips = [_to_relu(clip) for link in links for clip, _ in link.clips]
    changed = rescaling.write()
    error = verify(artifact, changed, data, clipped=bool(clips))
    facts = {
        "links": {link.name: _describe(link, totals[link.name], reached.get(link.name)) for link in links},
        "sweeps": sweeps,
        "clips_replaced": {name: saturation[name] for name in clips},
        "clips_kept": {name: share for name, share in saturation.items() if share > options.max_saturation},
        "max_relative_error": error,
    }
    asked = {**msgspec.structs.asdict(options), "data": data.digest if data is not None else None}
    return artifact.derive(changed, "equalize", asked, facts)


def _observe(
    artifact: Artifact, links: list[Link], data: Dataset | None, options: EqualizeOptions, progress: Progress
) -> tuple[dict[str, Array], dict[str, float]]:
    """The largest magnitude that each link's channels reach, and the share of values above the bound of each Clip."""
    clips = {_tensor(clip): top for link in links for clip, top in link.clips}
    if data is None:
        return {}, dict.fromkeys(clips, 1.0)
    reads: dict[str, list[Link]] = {}
    for link in links:
        for name in dict.fromkeys(read.tensor for read in link.reads):
            reads.setdefault(name, []).append(link)
    reached = {link.name: np.zeros(link.channels) for link in links}
    above, seen = dict.fromkeys(clips, 0), dict.fromkeys(clips, 0)
    taps = Taps(artifact, data, batch_size=options.batch_size, threads=options.threads)
    for name, array in taps.run([*reads, *clips], progress):
        for link in reads.get(name, ()):
            read = next(read for read in link.reads if read.tensor == name)
            reached[link.name] = np.maximum(reached[link.name], link.reduce(np.abs(array), read))
        if name in clips:
            above[name] += int((array > clips[name]).sum())
            seen[name] += array.size
    return reached, {name: above[name] / max(1, seen[name]) for name in clips}


def _settle(links: list[Link], reached: dict[str, Array], options: EqualizeOptions) -> tuple[dict[str, Array], int]:
    """The final divisors of each link, and the number of sweeps until none moved by a thousandth."""
    totals = {link.name: np.ones(link.channels) for link in links}
    for sweep in itertools.count(1):
        moved = 0.0
        for link in links:
            before = totals[link.name]
            first = reached[link.name] / before if link.name in reached else link.written[0].ranges()
            s = factors(first, link.read_ranges(), options.alpha)
            after = np.clip(before * s, 1 / options.limit, options.limit)
            link.rescale(after / before)
            totals[link.name] = after
            moved = max(moved, float(np.abs(np.log(after / before)).max()))
        if moved < 1e-3 or sweep >= options.max_sweeps:
            break
    if options.exact:
        totals = {name: np.exp2(np.round(np.log2(total))) for name, total in totals.items()}
    return totals, sweep


def factors(first: Array, second: Array, alpha: float) -> Array:
    """first^alpha / second^(1 - alpha) for each channel; 1 for those that one of the two never uses."""
    used = (first > 0) & (second > 0)
    if not used.any():
        return np.ones_like(first)
    first, second = (np.maximum(ranges, _DEAD * ranges.max()) for ranges in (first, second))
    return np.where(used, first**alpha / second ** (1 - alpha), 1.0)


def _to_relu(clip: ir.Node) -> str:
    """Put a Relu in place of ``clip``; returns the name of the tensor that it bounds."""
    bounded = _tensor(clip)
    graph.replace_by_nodes(clip, [ir.Node("", "Relu", [clip.inputs[0]], num_outputs=1, name=clip.name)])
    return bounded


def verify(original: Artifact, changed: bytes, data: Dataset | None, clipped: bool = False) -> float | None:
    """The largest relative error of an output. Raises Unsupported if it is more than rounding should be.

    Where a Clip was replaced the function is the same on ``data`` only, and only they are compared.
    """
    rows = call_rows(signature_of(original), _CHECKED_ROWS)
    samples = [] if data is None else [data.rows(0, rows)]
    error: float | None
    if clipped:
        with (
            loaded(original, as_written=True) as before,
            loaded(Artifact.from_bytes(changed), as_written=True) as after,
        ):
            given = after.forward(samples[0])
            found, reason = max(compare(want, given[name]) for name, want in before.forward(samples[0]).items())
        error, failure = found, reason if found > _TOLERANCE else ""
    else:
        verdict = Verifier(original, samples, _TOLERANCE).check(changed)
        error, failure = verdict.max_relative_error, verdict.failure
    if failure and not failure.startswith("unverifiable"):
        raise Unsupported(
            f"rescaling its channels changes what the model answers: {failure}",
            "scales that are powers of two round nothing: set exact=True",
        )
    return error


def _tensor(clip: ir.Node) -> str:
    """The tensor that a Clip bounds."""
    source = clip.inputs[0]
    assert source is not None
    return f"{source.name}"


def _describe(link: Link, total: Array, reached: Array | None) -> dict[str, object]:
    """``spread``: the largest channel's range by the median's, of those that are used, before and after."""
    found: dict[str, object] = {
        "readers": [f"{read.node.outputs[0].name}" for read in link.reads],
        "channels": link.channels,
        "scales": [float(total.min()), float(total.max())],
    }
    if reached is not None and reached.any():
        found["spread"] = [_spread(reached), _spread(reached / total)]
    return found


def _spread(ranges: Array) -> float:
    return round(float(ranges.max() / np.median(ranges[ranges > 0])), 2)
