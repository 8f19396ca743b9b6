"""Versions of a model, and the INT8 versions of a build."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import PenstockError, Unsupported
from penstock.measurement import Interval, times
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.method import OnProgress
from penstock.offline.compress.precision.dynamic import DynamicOptions, quantize_dynamic
from penstock.offline.compress.precision.products import share_of_products
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.choice import RangeChoiceOptions
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import IntegerScheme, integer_scheme, required_isa, symmetric
from penstock.offline.compress.reconstruct.reconstruction import reconstruct
from penstock.offline.deadline import BuildDeadline
from penstock.offline.sessions import signature_of
from penstock.resources import MachineFacts

_log = logging.getLogger(__name__)

T = TypeVar("T")
Look = Callable[[Artifact, Artifact, tuple[str, ...]], Mapping[str, Interval]]
"""Returns the measured speed-up of the second model over the first in each of the engines (if empty: in all)."""

_CHOICE_S = 4.0
"""Time limit in seconds for choosing range methods. The remaining tensors get the range of least squared error."""
_RECONSTRUCT_SHARE = 0.05
"""Maximum share of the budget for rounding weights by the results of layers. The remaining weights are rounded to nearest."""
_MOSTLY = 0.5
"""Versions that speed up only matrix products are made if these hold more than this fraction of the weights."""
_BLOCKS = {8: WeightOnlyOptions(8, 128), 4: WeightOnlyOptions(4, 32)}
"""The weight-only versions, by bits. Large blocks are faster, small ones more accurate."""
_LOOK_ROWS = 32
"""Number of samples for the ranges of models that are only timed."""
_FIRST_SHARE, _OTHERS_SHARE = 0.5, 0.25
"""Shares of the budget after which no further layout, and no further method of a layout, is tried."""
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
    """If matrix products hold most of the weights, also make a version with ranges computed at run time, and versions with INT8 and
    INT4 weights in blocks if a first look shows that these may be faster."""
    anywhere: bool = False
    """Use 7-bit weights, which every CPU multiplies without overflow."""
    engines: tuple[str, ...] = ()
    """The engines that may run the versions. Versions for other engines are not made. If empty, all engines."""


class _Layout(NamedTuple):
    """A placement with a kind of scales. INT8 models of one layout differ only in ranges, so their speed is equal."""

    placement: QdqPlacement
    kind: Literal["", "per-tensor", "symmetric"] = ""
    engines: tuple[str, ...] = ()
    """The engines on which the layout may be faster; if empty, all engines."""

    @property
    def name(self) -> str:
        return f"{self.placement.value}-{self.kind}" if self.kind else self.placement.value

    def scheme(self, usual: IntegerScheme) -> IntegerScheme:
        """The scheme of the layout, on a machine whose scheme is ``usual``."""
        if self.kind == "symmetric":
            return symmetric(usual)
        return msgspec.structs.replace(usual, per_tensor=bool(self.kind))


class _Way(NamedTuple):
    """A way to quantise. The other fields describe the version that it makes."""

    name: str
    make: Callable[[], Artifact]
    engines: tuple[str, ...] = ()
    mixes_rows: bool = False
    is_first: bool = True
    """True for the most promising way of a layout."""
    precision: str = "int8"


def integer_versions(
    fp32: Artifact,
    calibration: Dataset | None,
    choice: IntegerChoice,
    machine: MachineFacts,
    on_progress: OnProgress = lambda *_: None,
    *,
    look: Look | None = None,
    deadline: BuildDeadline | None = None,
) -> tuple[list[Version], tuple[str, ...]]:
    """Make INT8 versions of ``fp32`` by all calibration methods and layouts, without duplicates or wrong models. Also return notes.

    If matrix products hold most of the weights, the first method also makes versions with one scale per product, and versions with
    symmetric activations. ``look`` measures the layouts before, with ranges from a few samples, because ranges do not affect speed.
    Layouts that are provably slower than ``fp32`` in an engine are not tried in this engine. After a share of ``deadline``, only the
    first method is tried.
    """
    if calibration is None:
        return [], ("INT8 was not tried: there was no calibration data",)
    if not choice.methods and not choice.careful:
        return [], ("INT8 was not tried: no calibration method was requested",)
    scheme = integer_scheme(machine)
    if choice.anywhere:
        scheme = msgspec.structs.replace(scheme, reduce_range=True)
    failures: dict[str, str] = {}
    deadline = deadline or BuildDeadline()
    try:
        found = _layouts(fp32, calibration, scheme, choice.engines, failures)
        layouts, slow = _promising(fp32, found, look, on_progress) if look else (list(found), ())
        limit = _RECONSTRUCT_SHARE * deadline.budget_s
        ways = _ways(fp32, calibration, choice, scheme, layouts, limit, on_progress) if layouts else []
    except Unsupported as error:
        return [], (f"INT8 was not tried: {error.message}",)
    is_dynamic = choice.dynamic and bool(found) and share_of_products(fp32) > _MOSTLY
    if is_dynamic and not (choice.engines and set(choice.engines).isdisjoint(_FOR_PRODUCTS)):
        ranged = partial(quantize_dynamic, fp32, calibration, DynamicOptions(reduce_range=scheme.reduce_range))
        ways.append(_Way("dynamic", ranged, _FOR_PRODUCTS, signature_of(fp32).batchable))
    if choice.dynamic and look and not (choice.engines and set(choice.engines).isdisjoint(_FOR_PRODUCTS)):
        ways += _block_ways(fp32, calibration, look, _RECONSTRUCT_SHARE * deadline.budget_s)
    made, notes = _made(fp32, calibration, ways, required_isa(scheme, machine), failures, deadline, on_progress)
    lacking = (f"INT8 by {name} was not tried: {reason}" for name, reason in failures.items())
    if not made:
        return [], (*slow, *notes, *([f"INT8 was not tried: {next(iter(failures.values()))}"] if failures else []))
    return made, (f"INT8 on this CPU: {scheme.reason}", *slow, *lacking, *notes)


def _block_ways(fp32: Artifact, calibration: Dataset, look: Look, reconstruct_s: float) -> Iterator[_Way]:
    """The ways to quantise only the weights of large matrix products, if these hold most of the weights and this may be faster."""
    for bits, options in _BLOCKS.items() if share_of_products(fp32) > _MOSTLY else ():
        made = _attempt("blocks", partial(quantize_weights, fp32, None, options), {})
        speeds = look(fp32, made, _FOR_PRODUCTS) if made is not None else {}
        if made is not None and any(one.high >= 1 for one in speeds.values()):
            name, make = f"int{bits}-weights", partial(reconstruct, fp32, made, calibration, reconstruct_s)
            yield _Way(name, make, _FOR_PRODUCTS, is_first=False, precision=name)


def _layouts(
    fp32: Artifact, calibration: Dataset, scheme: IntegerScheme, engines: tuple[str, ...], failures: dict[str, str]
) -> dict[_Layout, Artifact]:
    """The distinct layouts, with models whose ranges come from a few samples; none if nothing can be quantised, with the reasons in
    ``failures``.
    """
    rows = signature_of(fp32).smallest_batch
    few = calibration.pick_evenly(min(calibration.count, max(rows, _LOOK_ROWS // rows * rows)))
    rough = ranges(collect(fp32, few), RangeMethod.MIN_MAX, scheme)
    layouts = [_Layout(placement) for placement in _PLACEMENTS]
    if share_of_products(fp32) > _MOSTLY:
        layouts += [_Layout(placement, "per-tensor", _FOR_PRODUCTS) for placement in _PLACEMENTS]
        layouts += [_Layout(placement, "symmetric", _FOR_SYMMETRIC) for placement in QdqPlacement]
    found: dict[str, tuple[_Layout, Artifact]] = {}
    for layout in layouts:
        if engines and layout.engines and set(engines).isdisjoint(layout.engines):
            continue
        # For a plain chain of layers, all placements give the same model.
        make = partial(quantize, fp32, rough, layout.scheme(scheme), layout.placement)
        model = _attempt(layout.name, make, failures)
        if model is not None:
            found.setdefault(model.digest, (layout, model))
    return dict(found.values())


def _promising(
    fp32: Artifact, layouts: Mapping[_Layout, Artifact], look: Look, on_progress: OnProgress
) -> tuple[list[_Layout], tuple[str, ...]]:
    """The layouts with the engines in which they may be faster than ``fp32``, fastest first, and notes on the others. Layouts that
    could not be timed come last.
    """
    found, notes = list[tuple[float, _Layout]](), list[str]()
    for number, (layout, model) in enumerate(layouts.items()):
        on_progress("look", number, len(layouts))
        speeds = look(fp32, model, layout.engines)
        kept = {engine: one for engine, one in speeds.items() if one.high >= 1}
        notes += [
            f"INT8 ({layout.name}) was not calibrated for {engine}, because it is slower than FP32 there: {times(one)}"
            for engine, one in speeds.items()
            if engine not in kept
        ]
        if kept or not speeds:
            best = max((one.value for one in kept.values()), default=0.0)
            is_limited = bool(layout.engines) or len(kept) < len(speeds)
            found.append((best, layout._replace(engines=tuple(kept) or layout.engines) if is_limited else layout))
    on_progress("look", len(layouts), len(layouts))
    return [layout for _, layout in sorted(found, key=lambda one: -one[0])], tuple(notes)


def _ways(
    fp32: Artifact,
    calibration: Dataset,
    choice: IntegerChoice,
    scheme: IntegerScheme,
    layouts: Iterable[_Layout],
    reconstruct_s: float,
    on_progress: OnProgress,
) -> list[_Way]:
    """The ways to quantise, the most promising first."""
    statistics = collect(fp32, calibration, progress=lambda done, total: on_progress("calibrate", done, total))
    by_method = {method: ranges(statistics, method, scheme) for method in choice.methods}

    def make(method: RangeMethod | None, layout: _Layout) -> Artifact:
        written = layout.scheme(scheme)
        if method is not None:
            return quantize(fp32, by_method[method], written, layout.placement)
        limits = RangeChoiceOptions(time_s=_CHOICE_S)
        recipe = PtqRecipe(placement=layout.placement, choice=limits, reconstruct_s=reconstruct_s)
        return quantize_with(recipe, fp32, calibration, scheme, written=written)

    tried: list[RangeMethod | None] = [*([None] if choice.careful else []), *choice.methods[::-1]]
    first, *others = tried
    ways = [(first, layout) for layout in layouts]
    ways += [(method, layout) for method in others for layout in layouts if not layout.kind]
    return [
        _Way(
            f"{method.value if method else 'best'}-{layout.name}",
            partial(make, method, layout),
            layout.engines,
            is_first=method is first,
        )
        for method, layout in ways
    ]


def _made(
    fp32: Artifact,
    calibration: Dataset,
    ways: Sequence[_Way],
    requires: tuple[str, ...],
    failures: dict[str, str],
    deadline: BuildDeadline,
    on_progress: OnProgress,
) -> tuple[list[Version], list[str]]:
    """The versions that ``ways`` make, and notes on wrong models and on ways for which there was no time."""
    found, notes, late = dict[str, Version](), list[str](), list[str]()
    for number, way in enumerate(ways):
        on_progress("quantize", number, len(ways))
        if found and deadline.is_past(_FIRST_SHARE if way.is_first else _OTHERS_SHARE):
            late.append(way.name)
            continue
        model = _attempt(way.name, way.make, failures)
        if model is None or model.digest in found:
            continue
        wrong: dict[str, str] = {}
        _attempt(way.name, partial(check_explained, fp32, model, calibration), wrong)
        if wrong:
            notes.append(f"INT8 by {way.name} was dropped: {wrong[way.name]}")
            continue
        is_int8 = way.precision == "int8"
        version = Version(model, way.precision, way.name if is_int8 else "", requires=requires if is_int8 else ())
        found[model.digest] = msgspec.structs.replace(version, engines=way.engines, mixes_rows=way.mixes_rows)
    on_progress("quantize", len(ways), len(ways))
    if late:
        notes.append(f"INT8 by {', '.join(late)} was not tried: there was no time within --budget")
    return list(found.values()), notes


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
