"""Versions of a model, and the INT8 versions of a build."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Literal, NamedTuple, TypeVar

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import PenstockError, Unsupported
from penstock.measurement import Interval, times
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.method import OnProgress
from penstock.offline.compress.precision.dynamic import DynamicOptions
from penstock.offline.compress.precision.half import halve_weights
from penstock.offline.compress.precision.products import share_of_products
from penstock.offline.compress.precision.recurrent import has_integer_lstm, quantize_all_dynamic, quantize_recurrent
from penstock.offline.compress.precision.storage import share_of_tables, store_in, store_tables, store_weights
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
_LARGE_TABLES = 0.1
"""Embedding tables are stored in INT8 if they hold more than this fraction of the model's bytes, or if only the size matters."""
_BLOCKS = {8: WeightOnlyOptions(8, 128), 4: WeightOnlyOptions(4, 32)}
"""The weight-only versions, by bits. Large blocks are faster, small ones more accurate."""
_LOOK_ROWS = 32
"""Number of samples for the ranges of models that are only timed."""
_CAREFUL_SHARE, _METHOD_SHARE = 0.45, 0.25
"""Shares of the budget after which the careful method ends and no quick method is started, and after which no other method is started.
"""
_LOOK_SHARE = 0.25
"""Share of the budget after which no further layout is timed."""
_CALIBRATION_SHARE = 0.08
"""Share of the budget for running the calibration data once. If all samples would take longer, fewer are used."""
_FOR_PRODUCTS = ("onnxruntime",)
"""The engines on which one scale per product and dynamic INT8 are faster. On OpenVINO, the former is not faster, and the latter is
slower than FP32."""
_FOR_SYMMETRIC = ("openvino",)
"""The engines on which symmetric activations are faster. ONNX Runtime multiplies signed activations more slowly."""
_QUICKEST = RangeMethod.MSE, RangeMethod.PERCENTILE, RangeMethod.MIN_MAX, RangeMethod.ENTROPY
"""The methods that only choose ranges, the most accurate first."""
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
    """If matrix products and LSTMs hold most of the weights, also make a version with ranges computed at run time, and versions with
    INT8 and INT4 weights in blocks if a first look shows that these may be faster. If the model has LSTMs, also make calibrated
    versions with LSTMs of the first kind."""
    smallest: bool = False
    """Use 7-bit weights, which every CPU multiplies without overflow, and also make versions that only store weights in fewer bits."""
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
    """True for the most accurate way of a layout."""
    is_quick: bool = False
    """True for a quick way of a layout that is the fastest in an engine."""
    precision: str = "int8"
    base: str = ""
    """The way whose result this way changes. It then costs little, so it is tried exactly if that way was tried."""

    @property
    def title(self) -> str:
        return f"INT8 by {self.name}" if self.precision == "int8" else self.name


def derived_versions(
    fp32: Artifact,
    calibration: Dataset | None,
    choice: IntegerChoice,
    machine: MachineFacts,
    on_progress: OnProgress = lambda *_: None,
    *,
    look: Look | None = None,
    deadline: BuildDeadline | None = None,
) -> tuple[list[Version], tuple[str, ...]]:
    """The ``integer_versions`` and, if ``choice.smallest``, versions with weights stored in 16, 8 or 4 bits. Also return notes."""
    made, notes = integer_versions(fp32, calibration, choice, machine, on_progress, look=look, deadline=deadline)
    if not choice.smallest:
        return made, notes
    makers = {
        "int8-weights": partial(store_weights, fp32),
        "fp16-weights": partial(halve_weights, fp32),
        "int4-weights": partial(store_in, fp32, _BLOCKS[4], calibration),
    }
    ways = [_Way(name, make, _FOR_PRODUCTS, precision=name) for name, make in makers.items()]
    failures: dict[str, str] = {}
    stored, lost = _made(fp32, calibration, ways, (), failures, deadline or BuildDeadline(), on_progress)
    missing = (f"{name} was not tried: {reason}" for name, reason in failures.items())
    return [*made, *stored], (*notes, *missing, *lost)


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
    Layouts that are provably slower than ``fp32`` in an engine are not tried in this engine. After shares of ``deadline``, the careful
    method ends, and no further method is tried. If a pass over the calibration data takes too long, fewer samples are used.
    """
    if calibration is None:
        return [], ("INT8 was not tried: there was no calibration data",)
    if not choice.methods and not choice.careful:
        return [], ("INT8 was not tried: no calibration method was requested",)
    scheme = integer_scheme(machine)
    if choice.smallest:
        scheme = msgspec.structs.replace(scheme, reduce_range=True)
    failures: dict[str, str] = {}
    deadline = deadline or BuildDeadline()
    options = DynamicOptions(reduce_range=scheme.reduce_range)
    is_dynamic = choice.dynamic and not (choice.engines and set(choice.engines).isdisjoint(_FOR_PRODUCTS))
    has_lstm = is_dynamic and has_integer_lstm(fp32, options)
    found, slow, fewer, ways = dict[_Layout, Artifact](), tuple[str, ...](), tuple[str, ...](), list[_Way]()
    try:
        calibration, fewer = _affordable(fp32, calibration, deadline)
        found = _layouts(fp32, calibration, scheme, choice.engines, failures)
        layouts, slow = _promising(fp32, found, look, deadline, on_progress) if look else (list(found), ())
        ways = _ways(fp32, calibration, choice, scheme, layouts, deadline, on_progress) if layouts else []
    except Unsupported as error:
        if not has_lstm:
            return [], (f"INT8 was not tried: {error.message}",)
        failures["calibration"] = error.message
    if is_dynamic:
        ways = list(_dynamic_ways(fp32, calibration, options, ways, has_lstm))
        ways += _block_ways(fp32, calibration, look, _RECONSTRUCT_SHARE * deadline.budget_s) if look and found else []
    tables, tables_note = _tables(fp32, next(iter(found.values()), None), choice, look)
    if tables:
        ways = [way._replace(make=partial(_with_tables, way.make)) for way in ways]
    made, notes = _made(fp32, calibration, ways, required_isa(scheme, machine), failures, deadline, on_progress)
    lacking = (f"INT8 by {name} was not tried: {reason}" for name, reason in failures.items())
    if not made:
        return [], (*slow, *notes, *([f"INT8 was not tried: {next(iter(failures.values()))}"] if failures else []))
    return made, (f"INT8 on this CPU: {scheme.reason}", *fewer, *slow, *lacking, *notes, *tables_note)


def _affordable(fp32: Artifact, calibration: Dataset, deadline: BuildDeadline) -> tuple[Dataset, tuple[str, ...]]:
    """``calibration``, or as many of its samples as can be run once within a share of ``deadline``, and a note in this case."""
    few, smallest = _few(fp32, calibration), signature_of(fp32).smallest_batch
    if few.count > smallest:
        collect(fp32, few.part(0, smallest))  # loads the model
    start = deadline.used_s
    collect(fp32, few)
    per_sample_s = (deadline.used_s - start) / few.count
    most = min(_CALIBRATION_SHARE * deadline.budget_s / max(per_sample_s, 1e-9), calibration.count)
    if most >= calibration.count:
        return calibration, ()
    some = calibration.few(max(few.count, int(most)), smallest)
    return some, (
        f"calibrated on {some.count} of {calibration.count} samples, evenly spaced: a larger --budget allows more",
    )


def _few(fp32: Artifact, calibration: Dataset) -> Dataset:
    """A few samples of ``calibration``, for models that are only timed."""
    return calibration.few(_LOOK_ROWS, signature_of(fp32).smallest_batch)


def _tables(
    fp32: Artifact, int8: Artifact | None, choice: IntegerChoice, look: Look | None
) -> tuple[bool, tuple[str, ...]]:
    """Whether to store embedding tables in INT8, and a note if this is slower."""
    share = share_of_tables(fp32)
    if share <= (0 if choice.smallest else _LARGE_TABLES):
        return False, ()
    speeds = look(int8, store_tables(int8), choice.engines) if look and int8 is not None else {}
    slower = [f"{times(one)} on {engine}" for engine, one in speeds.items() if one.high < 1]
    if slower and len(slower) == len(speeds):
        return False, (f"embedding tables stay FP32, because INT8 tables are slower: {', '.join(slower)}",)
    return True, (f"INT8 versions store embedding tables, {share:.0%} of the model, in INT8",)


def _with_tables(make: Callable[[], Artifact]) -> Artifact:
    return store_tables(make())


def _dynamic_ways(
    fp32: Artifact, calibration: Dataset, options: DynamicOptions, calibrated: Sequence[_Way], has_lstm: bool
) -> Iterator[_Way]:
    """The ``calibrated`` ways, and those with ranges computed at run time: for LSTMs of the best versions, and for all operators."""
    mixes_rows = signature_of(fp32).batchable
    for number, way in enumerate(calibrated):
        yield way
        if (
            has_lstm
            and (way.is_first or number == 0)
            and (not way.engines or not set(way.engines).isdisjoint(_FOR_PRODUCTS))
        ):
            make = partial(_with_recurrent, way.make, calibration, options)
            yield _Way(f"{way.name}-lstm", make, _FOR_PRODUCTS, mixes_rows, base=way.name)
    share = _attempt("dynamic", partial(share_of_products, fp32, recurrent=True), {})
    if share is not None and share > _MOSTLY:
        yield _Way("dynamic", partial(quantize_all_dynamic, fp32, calibration, options), _FOR_PRODUCTS, mixes_rows)


def _with_recurrent(make: Callable[[], Artifact], calibration: Dataset, options: DynamicOptions) -> Artifact:
    return quantize_recurrent(make(), calibration, options)


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
    rough = ranges(collect(fp32, _few(fp32, calibration)), RangeMethod.MIN_MAX, scheme)
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
    fp32: Artifact, layouts: Mapping[_Layout, Artifact], look: Look, deadline: BuildDeadline, on_progress: OnProgress
) -> tuple[list[_Layout], tuple[str, ...]]:
    """The layouts with the engines in which they may be faster than ``fp32``, fastest first, and notes on the others. Layouts that
    could not be timed come last. After a share of ``deadline``, no further layout is timed if one may be faster.
    """
    found, notes, late = list[tuple[float, _Layout]](), list[str](), list[str]()
    for number, (layout, model) in enumerate(layouts.items()):
        on_progress("look", number, len(layouts))
        if found and deadline.is_past(_LOOK_SHARE):
            late.append(f"INT8 ({layout.name})")
            continue
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
    if late:
        notes.append(f"{', '.join(late)} was not tried: there was no time within --budget")
    return [layout for _, layout in sorted(found, key=lambda one: -one[0])], tuple(notes)


def _ways(
    fp32: Artifact,
    calibration: Dataset,
    choice: IntegerChoice,
    scheme: IntegerScheme,
    layouts: Sequence[_Layout],
    deadline: BuildDeadline,
    on_progress: OnProgress,
) -> list[_Way]:
    """The ways to quantise: first a quick one, so that there is a result, then the careful method for each layout, then the others."""
    statistics = collect(fp32, calibration, progress=lambda done, total: on_progress("calibrate", done, total))
    by_method = {method: ranges(statistics, method, scheme) for method in choice.methods}

    def make(method: RangeMethod | None, layout: _Layout) -> Artifact:
        written = layout.scheme(scheme)
        if method is not None:
            return quantize(fp32, by_method[method], written, layout.placement)
        late = partial(deadline.is_past, _CAREFUL_SHARE)
        limits, reconstruct_s = RangeChoiceOptions(time_s=_CHOICE_S), _RECONSTRUCT_SHARE * deadline.budget_s
        recipe = PtqRecipe(placement=layout.placement, choice=limits, reconstruct_s=reconstruct_s)
        return quantize_with(recipe, fp32, calibration, scheme, written=written, is_late=late)

    tried: list[RangeMethod | None] = [*([None] if choice.careful else []), *choice.methods[::-1]]
    first, *others = tried
    quick = next((method for method in _QUICKEST if method in choice.methods), first)
    quickly = [(quick, layout) for layout in _fastest(layouts, choice.engines)]
    ways = [*quickly, *((first, layout) for layout in layouts)]
    ways += [(method, layout) for method in others for layout in layouts if not layout.kind]
    return [
        _Way(
            f"{method.value if method else 'best'}-{layout.name}",
            cache(partial(make, method, layout)),
            layout.engines,
            is_first=method is first,
            is_quick=(method, layout) in quickly,
        )
        for method, layout in dict.fromkeys(ways)
    ]


def _fastest(layouts: Sequence[_Layout], engines: Sequence[str]) -> list[_Layout]:
    """For each of ``engines``, its fastest layout, if ``layouts`` has the fastest first."""
    found, served = list[_Layout](), set[str]()
    for layout in layouts:
        runs_in = layout.engines or engines or ("any",)
        if not served.issuperset(runs_in):
            found.append(layout)
            served.update(runs_in)
        if not layout.engines:
            break
    return found


def _made(
    fp32: Artifact,
    calibration: Dataset | None,
    ways: Sequence[_Way],
    requires: tuple[str, ...],
    failures: dict[str, str],
    deadline: BuildDeadline,
    on_progress: OnProgress,
) -> tuple[list[Version], list[str]]:
    """The versions that ``ways`` make, and notes on wrong models and on ways for which there was no time."""
    found, notes, late = dict[str, Version](), list[str](), list[str]()
    titles = {way.name: way.title for way in ways}
    for number, way in enumerate(ways):
        on_progress("quantize", number, len(ways))
        is_late = number > 0 and deadline.is_past(_CAREFUL_SHARE if way.is_quick else _METHOD_SHARE)
        if way.base in late or (is_late and not way.base):
            late.append(way.name)
            continue
        model = _attempt(way.name, way.make, failures)
        if model is None or model.digest in found:
            continue
        wrong: dict[str, str] = {}
        _attempt(way.name, partial(check_explained, fp32, model, calibration), wrong)
        if wrong:
            notes.append(f"{way.title} was dropped: {wrong[way.name]}")
            continue
        is_int8 = way.precision == "int8"
        version = Version(model, way.precision, way.name if is_int8 else "", requires=requires if is_int8 else ())
        found[model.digest] = msgspec.structs.replace(version, engines=way.engines, mixes_rows=way.mixes_rows)
    on_progress("quantize", len(ways), len(ways))
    if late:
        notes.append(f"{', '.join(titles[name] for name in late)} was not tried: there was no time within --budget")
    return list(found.values()), notes


def _attempt(name: str, make: Callable[[], T], failures: dict[str, str]) -> T | None:
    """Return the result of ``make()``; None, with the reason in ``failures``, if it fails. A failure must not end the build."""
    try:
        return make()
    except PenstockError as error:
        failures[name] = error.message
    except Exception as error:  # noqa: BLE001 - a defect in one method
        _log.warning("%s failed", name, exc_info=True)
        failures[name] = f"internal error: {type(error).__name__}: {str(error)[:200]}"
    return None
