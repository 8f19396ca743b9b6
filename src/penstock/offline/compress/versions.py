"""Versions of a model, and the INT8 versions of a build."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import Unsupported, WrongResult
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.method import OnProgress
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.choice import RangeChoiceOptions
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme, required_isa
from penstock.resources import MachineFacts

_CHOICE_S = 4.0
"""Seconds for choosing the range methods of all tensors. After that, ranges of least squared error are used."""


class Version(msgspec.Struct, frozen=True):
    """A model derived from the original: optimised, quantised or compressed."""

    artifact: Artifact
    precision: str = "fp32"
    calibration: str = ""
    """The calibration method of an INT8 version; empty for others."""
    compression: str = ""
    """The steps that changed weights or structure, joined by ``+``; empty if there are none."""
    requires: tuple[str, ...] = ()
    stored_bytes: int = 0
    """Size as a coded model; 0 if the model is stored uncoded."""


def integer_versions(
    fp32: Artifact,
    calibration: Dataset | None,
    methods: Sequence[RangeMethod],
    careful: bool,
    machine: MachineFacts,
    on_progress: OnProgress = lambda *_: None,
    *,
    anywhere: bool = False,
) -> tuple[list[Version], tuple[str, ...]]:
    """The distinct INT8 models of ``fp32`` whose error is what rounding explains, by calibration method and placement, and notes.

    ``careful`` adds versions with equalised channels, ranges chosen for each tensor, and corrected biases. ``anywhere`` uses 7-bit
    weights, which every CPU multiplies without overflow.
    """
    if calibration is None:
        return [], ("INT8 was not tried: there was no calibration data",)
    if not methods and not careful:
        return [], ("INT8 was not tried: no calibration method was requested",)
    scheme = integer_scheme(machine)
    if anywhere:
        scheme = msgspec.structs.replace(scheme, reduce_range=True)
    try:
        statistics = collect(fp32, calibration, progress=lambda done, total: on_progress("calibrate", done, total))
    except Unsupported as error:
        return [], (f"INT8 was not tried: {error.message}",)
    found: dict[str, Artifact] = {}
    refusals: list[str] = []
    by_method = {method: ranges(statistics, method, scheme) for method in (RangeMethod.MIN_MAX, *methods)}
    plain: dict[str, tuple[QdqPlacement, Artifact]] = {}
    for placement in QdqPlacement:
        try:
            # For a plain chain of layers, both placements give the same model.
            model = quantize(fp32, by_method[RangeMethod.MIN_MAX], scheme, placement)
            plain.setdefault(model.digest, (placement, model))
        except Unsupported as error:
            refusals.append(error.message)
    ways = [(*known, method) for known in plain.values() for method in (*methods, *([None] if careful else []))]
    for number, (placement, min_max, method) in enumerate(ways):
        on_progress("quantize", number, len(ways))
        if method is None:
            recipe = PtqRecipe(placement=placement, choice=RangeChoiceOptions(time_s=_CHOICE_S))
            model = quantize_with(recipe, fp32, calibration, scheme)
        elif method is RangeMethod.MIN_MAX:
            model = min_max
        else:
            model = quantize(fp32, by_method[method], scheme, placement)
        name = f"{method.value if method else 'best'}-{placement.value}"
        if all(model.digest != other.digest for other in found.values()):
            found[name] = model
    on_progress("quantize", len(ways), len(ways))
    if not found:
        return [], (f"INT8 was not tried: {refusals[0]}",)
    wrong = {name: reason for name, model in found.items() if (reason := _objection(fp32, model, calibration))}
    requires = required_isa(scheme, machine)
    versions = [
        Version(model, "int8", calibration=name, requires=requires)
        for name, model in found.items()
        if name not in wrong
    ]
    dropped = (f"INT8 '{name}' was dropped: {reason}" for name, reason in wrong.items())
    return versions, (f"INT8 on this CPU: {scheme.reason}", *dropped)


def _objection(fp32: Artifact, model: Artifact, calibration: Dataset) -> str:
    """Why ``model`` does not compute what ``fp32`` computes; empty if it does."""
    try:
        check_explained(fp32, model, calibration)
    except WrongResult as error:
        return error.message
    return ""
