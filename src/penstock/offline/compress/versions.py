"""Versions of a model, and the INT8 versions of a build."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import PenstockError, Unsupported, WrongResult
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

_log = logging.getLogger(__name__)

_CHOICE_S = 4.0
"""Time limit in seconds for choosing range methods. The remaining tensors get the range of least squared error."""


class Version(msgspec.Struct, frozen=True):
    """A model derived from the original: optimised, quantised or compressed."""

    artifact: Artifact
    precision: str = "fp32"
    calibration: str = ""
    """The calibration method of an INT8 version; empty for other versions."""
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
    """An INT8 version of ``fp32`` for each calibration method and placement, and notes. Drops duplicates and models with defects.

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
    by_method = {method: ranges(statistics, method, scheme) for method in (RangeMethod.MIN_MAX, *methods)}

    def make(placement: QdqPlacement, method: RangeMethod | None) -> Artifact:
        if method is not None:
            return quantize(fp32, by_method[method], scheme, placement)
        recipe = PtqRecipe(placement=placement, choice=RangeChoiceOptions(time_s=_CHOICE_S))
        return quantize_with(recipe, fp32, calibration, scheme)

    failures: dict[str, str] = {}
    plain: dict[str, tuple[QdqPlacement, Artifact]] = {}
    for placement in QdqPlacement:
        # For a plain chain of layers, both placements give the same model.
        model = _attempt(
            f"min-max-{placement.value}", functools.partial(make, placement, RangeMethod.MIN_MAX), failures
        )
        if model is not None:
            plain.setdefault(model.digest, (placement, model))
    ways = [(*known, method) for known in plain.values() for method in (*methods, *([None] if careful else []))]
    found: dict[str, Artifact] = {}
    for number, (placement, min_max, method) in enumerate(ways):
        on_progress("quantize", number, len(ways))
        name = f"{method.value if method else 'best'}-{placement.value}"
        is_made = method is RangeMethod.MIN_MAX
        model = min_max if is_made else _attempt(name, functools.partial(make, placement, method), failures)
        if model is not None and all(model.digest != other.digest for other in found.values()):
            found[name] = model
    on_progress("quantize", len(ways), len(ways))
    if not found:
        return [], (f"INT8 was not tried: {next(iter(failures.values()))}",)
    wrong = {name: reason for name, model in found.items() if (reason := _objection(fp32, model, calibration))}
    requires = required_isa(scheme, machine)
    versions = [
        Version(model, "int8", calibration=name, requires=requires)
        for name, model in found.items()
        if name not in wrong
    ]
    dropped = (f"INT8 by {name} was dropped: {reason}" for name, reason in wrong.items())
    lacking = (f"INT8 by {name} was not tried: {reason}" for name, reason in failures.items())
    return versions, (f"INT8 on this CPU: {scheme.reason}", *lacking, *dropped)


def _attempt(name: str, make: Callable[[], Artifact], failures: dict[str, str]) -> Artifact | None:
    """Return the result of ``make()``; None, with the reason in ``failures``, if it fails. A failure must not end the build."""
    try:
        return make()
    except PenstockError as error:
        failures[name] = error.message
    except Exception as error:  # noqa: BLE001 - a defect in one method
        _log.warning("INT8 by %s failed", name, exc_info=True)
        failures[name] = f"internal error: {type(error).__name__}: {str(error)[:200]}"
    return None


def _objection(fp32: Artifact, model: Artifact, calibration: Dataset) -> str:
    """Why ``model`` does not compute the same function as ``fp32``; empty if it does."""
    try:
        check_explained(fp32, model, calibration)
    except WrongResult as error:
        return error.message
    return ""
