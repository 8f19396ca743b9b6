"""Cross-layer equalisation: give all channels of a tensor between two layers similar ranges, so that one scale fits all channels.

The method is that of M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, §4.1.
Channel i of the tensor between weights W1 and W2 is divided by s_i = sqrt(r1_i / r2_i), where r1_i is the largest magnitude in row i
of W1, and r2_i in column i of W2. Sweeps over all pairs repeat until no scale changes. For pointwise, depthwise and pointwise
convolutions in sequence, this is the three-layer formula of Nagel et al. Weights have one scale per output channel and need no
equalisation, but an activation has only one scale. So, with data, r1_i is the largest magnitude of channel i of the activation.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import Unsupported
from penstock.offline.compress.ptq.rescale import Link, Rescaling
from penstock.offline.compress.taps import Taps
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import form_of
from penstock.offline.optimize.model import infer_shapes, read_proto
from penstock.offline.optimize.verify import Verifier, compare
from penstock.offline.sessions import call_rows, loaded, signature_of
from penstock.tensor import Array

_ALPHA = 0.5
"""The exponent α of the scales, from 0 to 1. A larger α moves more of a tensor's uneven ranges into the weights of its consumers."""
_LIMIT = 1e4
"""Maximum factor by which a channel is scaled, up or down."""
_DEAD = 1e-6
"""Minimum range of a channel, as a fraction of the largest channel's range. A channel below it is practically empty."""
_MAX_SWEEPS = 50
_CHECKED_ROWS = 64
_TOLERANCE = 1e-5
"""Tolerance for the outputs. A scale that is not a power of two rounds each weight once more, which causes an error of a few times
6e-8 per layer."""


def equalize(artifact: Artifact, data: Dataset | None = None, exact: bool = True) -> Artifact:
    """Return a model with the same outputs whose channels have similar ranges. ``artifact`` is FP32, with BatchNormalization folded.

    The ranges are taken from activations on ``data`` or, without data, from weights. ``exact`` rounds scales to powers of two, which
    does not change the significant bits of products. A Clip from 0 (ReLU6) becomes a Relu if no value of the data exceeds its bound;
    otherwise its tensor stays unchanged. A tensor with consumers other than products stays unchanged. Raises InvalidModel or
    Unsupported if the model cannot be read or contains BatchNormalization; InvalidData if the data do not fit.
    """
    model = infer_shapes(read_proto(artifact))
    if any(node.op_type == "BatchNormalization" for node in model.graph):
        raise Unsupported(
            "the model has BatchNormalization between the layers to equalise", "fold it first, with optimize()"
        )
    rescaling = Rescaling(model)
    links = [link for link in rescaling.links if form_of(link.writer) is not None]
    reached, saturation = _observe(artifact, links, data)
    links = [link for link in links if not any(saturation[_bounded(clip)] for clip, _ in link.clips)]
    totals, sweeps = _settle(links, reached)
    if exact:
        totals = {name: np.exp2(np.round(np.log2(total))) for name, total in totals.items()}
    rescaling.restore()
    for link in links:
        link.rescale(totals[link.name])
    clips = [_to_relu(clip) for link in links for clip, _ in link.clips]
    changed = rescaling.write()
    facts = {
        "links": {link.name: _describe(link, totals[link.name], reached.get(link.name)) for link in links},
        "sweeps": sweeps,
        "clips_replaced": {name: saturation[name] for name in clips},
        "clips_kept": {name: share for name, share in saturation.items() if share},
        "max_relative_error": verify(artifact, changed, data, clipped=bool(clips)),
    }
    asked = {"exact": exact, "data": data.digest if data is not None else None}
    return artifact.derive(changed, "equalize", asked, facts)


def _observe(artifact: Artifact, links: list[Link], data: Dataset | None) -> tuple[dict[str, Array], dict[str, float]]:
    """The largest magnitude of each link's channels, and the fraction of values above the bound of each Clip."""
    clips = {_bounded(clip): top for link in links for clip, top in link.clips}
    if data is None:
        return {}, dict.fromkeys(clips, 1.0)
    reads: dict[str, list[Link]] = {}
    for link in links:
        for name in dict.fromkeys(read.tensor for read in link.reads):
            reads.setdefault(name, []).append(link)
    reached = {link.name: np.zeros(link.channels) for link in links}
    above, seen = dict.fromkeys(clips, 0), dict.fromkeys(clips, 0)
    for name, array in Taps(artifact, data).run([*reads, *clips]):
        for link in reads.get(name, ()):
            read = next(read for read in link.reads if read.tensor == name)
            reached[link.name] = np.maximum(reached[link.name], link.reduce(np.abs(array), read))
        if name in clips:
            above[name] += int((array > clips[name]).sum())
            seen[name] += array.size
    return reached, {name: above[name] / max(1, seen[name]) for name in clips}


def _settle(links: list[Link], reached: dict[str, Array]) -> tuple[dict[str, Array], int]:
    """The final divisors of each link, and the number of sweeps until no divisor changed by more than a thousandth."""
    totals = {link.name: np.ones(link.channels) for link in links}
    for sweep in itertools.count(1):
        moved = 0.0
        for link in links:
            before = totals[link.name]
            first = reached[link.name] / before if link.name in reached else link.written[0].ranges()
            after = np.clip(before * factors(first, link.read_ranges(), _ALPHA), 1 / _LIMIT, _LIMIT)
            link.rescale(after / before)
            totals[link.name] = after
            moved = max(moved, float(np.abs(np.log(after / before)).max()))
        if moved < 1e-3 or sweep >= _MAX_SWEEPS:
            break
    return totals, sweep


def factors(first: Array, second: Array, alpha: float) -> Array:
    """first^alpha / second^(1 - alpha) for each channel; 1 where either is 0."""
    used = (first > 0) & (second > 0)
    if not used.any():
        return np.ones_like(first)
    first, second = (np.maximum(ranges, _DEAD * ranges.max()) for ranges in (first, second))
    return np.where(used, first**alpha / second ** (1 - alpha), 1.0)


def _to_relu(clip: ir.Node) -> str:
    """Replace ``clip`` by a Relu. Returns the name of the tensor that it bounded."""
    bounded = _bounded(clip)
    graph.replace_by_nodes(clip, [ir.Node("", "Relu", [clip.inputs[0]], num_outputs=1, name=clip.name)])
    return bounded


def verify(original: Artifact, changed: Artifact, data: Dataset | None, clipped: bool = False) -> float | None:
    """The largest relative error of all outputs. Raises Unsupported if the error is too large to be caused by rounding.

    If a Clip was replaced (``clipped``), the two models are equal only on ``data``, so only their outputs on ``data`` are compared.
    """
    samples = (
        []
        if data is None
        else [data.call(call_rows(signature_of(original), data.fitting(min(_CHECKED_ROWS, data.count))))]
    )
    error: float | None
    if clipped:
        with (
            loaded(original, as_written=True) as before,
            loaded(changed, as_written=True) as after,
        ):
            given = after.forward(samples[0])
            found, reason = max(compare(want, given[name]) for name, want in before.forward(samples[0]).items())
        error, failure = found, reason if found > _TOLERANCE else ""
    else:
        verdict = Verifier(original, samples, _TOLERANCE).check(changed)
        error, failure = verdict.max_relative_error, verdict.failure
    if failure and not failure.startswith("unverifiable"):
        raise Unsupported(
            f"rescaling the channels changes the model's outputs: {failure}", "quantise the model without equalisation"
        )
    return error


def _bounded(clip: ir.Node) -> str:
    """The tensor that a Clip bounds."""
    source = clip.inputs[0]
    assert source is not None
    return f"{source.name}"


def _describe(link: Link, total: Array, reached: Array | None) -> dict[str, object]:
    """The facts of a link. ``spread`` is the range of the largest channel divided by the median range, before and after."""
    found: dict[str, object] = {
        "readers": [f"{read.node.outputs[0].name}" for read in link.reads],
        "channels": link.channels,
        "scales": [float(total.min()), float(total.max())],
    }
    if reached is not None and reached.any():
        spreads = (ranges.max() / np.median(ranges[ranges > 0]) for ranges in (reached, reached / total))
        found["spread"] = [round(float(spread), 2) for spread in spreads]
    return found
