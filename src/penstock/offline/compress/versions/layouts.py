"""Layouts: the placements of quantised operators with kinds of scales, and which of them may be faster than FP32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.titles import precision_title
from penstock.dataset import Dataset
from penstock.measurement import Interval, times
from penstock.offline.compress.method import OnProgress
from penstock.offline.compress.precision.products import share_of_products
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement, float_model
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme, symmetric
from penstock.offline.compress.versions.attempt import attempt, not_tried
from penstock.offline.deadline import BuildDeadline

Look = Callable[[Artifact, Artifact, tuple[str, ...]], Mapping[str, Interval]]
"""Returns the measured speed-up of the second model over the first in each of the engines (if empty: in all)."""

FOR_PRODUCTS = ("onnxruntime",)
"""The engines on which one scale per product and dynamic INT8 are faster. On OpenVINO, the former is not faster, and the latter is
slower than FP32."""
_FOR_SYMMETRIC = ("openvino",)
"""The engines on which symmetric activations are faster. ONNX Runtime multiplies signed activations more slowly."""
_FOR_TRANSPOSED = ("openvino",)
"""The engines with an integer kernel for ConvTranspose."""
_PLACEMENTS = QdqPlacement.LINEAR, QdqPlacement.WIDE
"""The placements to try with every method. The attention placement is only faster with symmetric activations."""
_LOOK_SHARE = 0.25
"""Share of the budget after which no further layout is timed."""
MOSTLY = 0.5
"""Versions that speed up only matrix products are made if these hold more than this fraction of the weights."""


class IntegerLayout(NamedTuple):
    """A placement with a kind of scales. INT8 models of one layout differ only in ranges, so their speed is equal."""

    placement: QdqPlacement
    kind: Literal["", "per-tensor", "symmetric", "transposed"] = ""
    engines: tuple[str, ...] = ()
    """The engines on which the layout may be faster; if empty, all engines."""

    @property
    def name(self) -> str:
        return f"{self.placement.value}-{self.kind}" if self.kind else self.placement.value

    def scheme(self, usual: IntegerScheme) -> IntegerScheme:
        """The scheme of the layout, on a machine whose scheme is ``usual``."""
        given = symmetric(usual) if self.kind == "symmetric" else usual
        return msgspec.structs.replace(
            given, per_tensor=self.kind == "per-tensor", transposed=self.kind == "transposed"
        )


def make_layouts(
    fp32: Artifact, few: Dataset, scheme: IntegerScheme, engines: tuple[str, ...], failures: dict[str, str]
) -> dict[IntegerLayout, Artifact]:
    """The distinct layouts, with models whose ranges come from the samples ``few``. If nothing can be quantised, there are none, and
    ``failures`` has the reasons.
    """
    rough = ranges(collect(fp32, few), RangeMethod.MIN_MAX, scheme)
    layouts = [IntegerLayout(placement) for placement in _PLACEMENTS]
    if share_of_products(fp32) > MOSTLY:
        layouts += [IntegerLayout(placement, "per-tensor", FOR_PRODUCTS) for placement in _PLACEMENTS]
        layouts += [IntegerLayout(placement, "symmetric", _FOR_SYMMETRIC) for placement in QdqPlacement]
    if any(node.op_type == "ConvTranspose" for node in float_model(fp32).nodes):
        layouts += [IntegerLayout(placement, "transposed", _FOR_TRANSPOSED) for placement in _PLACEMENTS]
    found: dict[str, tuple[IntegerLayout, Artifact]] = {}
    for layout in layouts:
        if engines and layout.engines and set(engines).isdisjoint(layout.engines):
            continue
        # For a plain chain of layers, all placements give the same model.
        make = partial(quantize, fp32, rough, layout.scheme(scheme), layout.placement)
        model = attempt(layout.name, make, failures)
        if model is not None:
            found.setdefault(model.digest, (layout, model))
    return dict(found.values())


def promising(
    fp32: Artifact,
    layouts: Mapping[IntegerLayout, Artifact],
    look: Look,
    deadline: BuildDeadline,
    on_progress: OnProgress,
) -> tuple[list[IntegerLayout], tuple[str, ...]]:
    """The layouts with the engines in which they may be faster than ``fp32``, fastest first, and notes on the others. Layouts that
    could not be timed come last. After a share of ``deadline``, no further layout is timed if one may be faster.
    """
    found, notes, late = list[tuple[float, IntegerLayout]](), list[str](), list[str]()
    for number, (layout, model) in enumerate(layouts.items()):
        on_progress("look", number, len(layouts))
        if found and deadline.is_past(_LOOK_SHARE):
            late.append(precision_title("int8", layout.name))
            continue
        speeds, named = look(fp32, model, layout.engines), precision_title("int8", layout.name)
        kept = {engine: one for engine, one in speeds.items() if one.high >= 1}
        notes += [
            f"{named} was not calibrated for {engine}, because it is slower than FP32 there: {times(one)}"
            for engine, one in speeds.items()
            if engine not in kept
        ]
        if kept or not speeds:
            best = max((one.value for one in kept.values()), default=0.0)
            is_limited = bool(layout.engines) or len(kept) < len(speeds)
            found.append((best, layout._replace(engines=tuple(kept) or layout.engines) if is_limited else layout))
    on_progress("look", len(layouts), len(layouts))
    if late:
        notes.append(not_tried(late, deadline.why_late))
    return [layout for _, layout in sorted(found, key=lambda one: -one[0])], tuple(notes)


def fastest(layouts: Sequence[IntegerLayout], engines: Sequence[str]) -> list[IntegerLayout]:
    """For each of ``engines``, its fastest layout, if ``layouts`` has the fastest first."""
    found, served = list[IntegerLayout](), set[str]()
    for layout in layouts:
        runs_in = layout.engines or engines or ("any",)
        if not served.issuperset(runs_in):
            found.append(layout)
            served.update(runs_in)
        if not layout.engines:
            break
    return found
