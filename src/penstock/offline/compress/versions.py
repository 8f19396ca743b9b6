"""Versions of a model, and the INT8 versions of a build."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import PenstockError, Unsupported
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.method import OnProgress
from penstock.offline.compress.precision.dynamic import DynamicOptions, quantize_dynamic
from penstock.offline.compress.precision.products import share_of_products
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.choice import RangeChoiceOptions
from penstock.offline.compress.ptq.ranges.histogram import TensorStatistics
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import IntegerScheme, integer_scheme, required_isa, symmetric
from penstock.offline.sessions import signature_of
from penstock.resources import MachineFacts

_log = logging.getLogger(__name__)

T = TypeVar("T")

_CHOICE_S = 4.0
"""Time limit in seconds for choosing range methods. The remaining tensors get the range of least squared error."""
_MOSTLY = 0.5
"""Versions that speed up only matrix products are made if these hold more than this fraction of the weights."""
_FOR_PRODUCTS = ("onnxruntime",)
"""The engines on which one scale per product and dynamic INT8 are faster. On OpenVINO, the former is not faster, and the latter is
slower than FP32."""
_FOR_SYMMETRIC = ("openvino",)
"""The engines on which symmetric activations are faster. ONNX Runtime multiplies signed activations more slowly."""
_PLACEMENTS = QdqPlacement.LINEAR, QdqPlacement.WIDE
"""The placements to try with every method. The attention placement is only faster with symmetric activations."""


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
    """Size as a coded model; 0 if the model is not stored as a coded model."""
    engines: tuple[str, ...] = ()
    """The engines on which the version is worth measuring. If empty, all engines."""
    mixes_rows: bool = False
    """True if the outputs for a sample depend on the other samples of a call. A server then cannot merge requests."""


class IntegerChoice(msgspec.Struct, frozen=True):
    """The INT8 versions to make."""

    methods: tuple[RangeMethod, ...] = tuple(RangeMethod)
    """The calibration methods."""
    careful: bool = True
    """Also make versions with equalised channels, a range method chosen for each tensor, and corrected biases."""
    dynamic: bool = False
    """If matrix products hold most of the weights, also make a version with ranges computed at run time."""
    anywhere: bool = False
    """Use 7-bit weights, which every CPU multiplies without overflow."""
    engines: tuple[str, ...] = ()
    """The engines that may run the versions. Versions for other engines are not made. If empty, all engines."""


class _Way(NamedTuple):
    """A way to quantise. ``engines`` and ``mixes_rows`` describe the version that it makes."""

    name: str
    make: Callable[[], Artifact]
    engines: tuple[str, ...] = ()
    mixes_rows: bool = False


def integer_versions(
    fp32: Artifact,
    calibration: Dataset | None,
    choice: IntegerChoice,
    machine: MachineFacts,
    on_progress: OnProgress = lambda *_: None,
) -> tuple[list[Version], tuple[str, ...]]:
    """Make INT8 versions of ``fp32`` by all calibration methods and placements, without duplicates or wrong models. Also return notes.

    If matrix products hold most of the weights, the last method also makes versions with one scale per product, and versions with
    symmetric activations.
    """
    if calibration is None:
        return [], ("INT8 was not tried: there was no calibration data",)
    if not choice.methods and not choice.careful:
        return [], ("INT8 was not tried: no calibration method was requested",)
    scheme = integer_scheme(machine)
    if choice.anywhere:
        scheme = msgspec.structs.replace(scheme, reduce_range=True)
    try:
        statistics = collect(fp32, calibration, progress=lambda done, total: on_progress("calibrate", done, total))
    except Unsupported as error:
        return [], (f"INT8 was not tried: {error.message}",)
    failures: dict[str, str] = {}
    ways = _ways(fp32, calibration, choice, scheme, statistics, failures)
    requires = required_isa(scheme, machine)
    found: dict[str, Version] = {}
    for number, way in enumerate(ways):
        on_progress("quantize", number, len(ways))
        model = _attempt(way.name, way.make, failures)
        if model is not None and model.digest not in found:
            version = Version(model, "int8", calibration=way.name, requires=requires)
            found[model.digest] = msgspec.structs.replace(version, engines=way.engines, mixes_rows=way.mixes_rows)
    on_progress("quantize", len(ways), len(ways))
    if not found:
        return [], (f"INT8 was not tried: {next(iter(failures.values()))}",)
    wrong: dict[str, str] = {}
    for version in found.values():
        _attempt(version.calibration, partial(check_explained, fp32, version.artifact, calibration), wrong)
    versions = [version for version in found.values() if version.calibration not in wrong]
    dropped = (f"INT8 by {name} was dropped: {reason}" for name, reason in wrong.items())
    lacking = (f"INT8 by {name} was not tried: {reason}" for name, reason in failures.items())
    return versions, (f"INT8 on this CPU: {scheme.reason}", *lacking, *dropped)


def _ways(
    fp32: Artifact,
    calibration: Dataset,
    choice: IntegerChoice,
    scheme: IntegerScheme,
    statistics: Mapping[str, TensorStatistics],
    failures: dict[str, str],
) -> list[_Way]:
    """The ways to quantise ``fp32``; none if no placement quantises anything, with the reasons in ``failures``."""
    by_method = {method: ranges(statistics, method, scheme) for method in (RangeMethod.MIN_MAX, *choice.methods)}

    def make(placement: QdqPlacement, method: RangeMethod | None, written: IntegerScheme = scheme) -> Artifact:
        if method is not None:
            return quantize(fp32, by_method[method], written, placement)
        recipe = PtqRecipe(placement=placement, choice=RangeChoiceOptions(time_s=_CHOICE_S))
        return quantize_with(recipe, fp32, calibration, scheme, written=written)

    plain: dict[str, QdqPlacement] = {}
    for placement in _PLACEMENTS:
        # For a plain chain of layers, both placements give the same model.
        model = _attempt(f"min-max-{placement.value}", partial(make, placement, RangeMethod.MIN_MAX), failures)
        if model is not None:
            plain.setdefault(model.digest, placement)
    tried = (*choice.methods, *([None] if choice.careful else []))
    found = [_Way(_name(method, place), partial(make, place, method)) for place in plain.values() for method in tried]
    if not plain or share_of_products(fp32) <= _MOSTLY:
        return found
    for kind, written, engines, places in (
        ("per-tensor", msgspec.structs.replace(scheme, per_tensor=True), _FOR_PRODUCTS, plain.values()),
        ("symmetric", symmetric(scheme), _FOR_SYMMETRIC, QdqPlacement),
    ):
        for place in places:
            made = partial(make, place, tried[-1], written)
            found.append(_Way(f"{_name(tried[-1], place)}-{kind}", made, engines))
    if choice.dynamic:
        options = DynamicOptions(reduce_range=scheme.reduce_range)
        ranged = partial(quantize_dynamic, fp32, calibration, options)
        found.append(_Way("dynamic", ranged, _FOR_PRODUCTS, signature_of(fp32).batchable))
    return [way for way in found if not (choice.engines and way.engines) or set(way.engines) & set(choice.engines)]


def _name(method: RangeMethod | None, placement: QdqPlacement) -> str:
    return f"{method.value if method else 'best'}-{placement.value}"


def _attempt(name: str, make: Callable[[], T], failures: dict[str, str]) -> T | None:
    """Return the result of ``make()``; None, with the reason in ``failures``, if it fails. A failure must not end the build."""
    try:
        return make()
    except PenstockError as error:
        failures[name] = error.message
    except Exception as error:  # noqa: BLE001 - a defect in one method
        _log.warning("INT8 by %s failed", name, exc_info=True)
        failures[name] = f"internal error: {type(error).__name__}: {str(error)[:200]}"
    return None
