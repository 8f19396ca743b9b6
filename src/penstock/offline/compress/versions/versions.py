"""Versions of a model: the INT8 versions of a build, and those that only store weights in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import Unsupported
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.method import OnProgress
from penstock.offline.compress.precision.dynamic import DynamicOptions
from penstock.offline.compress.precision.recurrent import has_integer_lstm
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.scheme import integer_scheme, required_isa
from penstock.offline.compress.versions.attempt import attempt, not_tried
from penstock.offline.compress.versions.layouts import FOR_PRODUCTS, IntegerLayout, Look, make_layouts, promising
from penstock.offline.compress.versions.ways import (
    CAREFUL_SHARE,
    IntegerChoice,
    Way,
    block_ways,
    calibrated_ways,
    dynamic_ways,
    storing_ways,
    with_tables,
)
from penstock.offline.deadline import BuildDeadline
from penstock.offline.sessions import signature_of
from penstock.resources import MachineFacts

_FEWEST_ROWS, _LOOK_ROWS = 8, 32
"""Minimum and maximum number of samples for the ranges of models that are only timed."""
_CALIBRATION_SHARE = 0.08
"""Share of the budget for running the calibration data once. If all samples would take longer, fewer are used."""
_FEWEST_SHARE = 0.15
"""If the fewest samples take more than this share of the budget, there is no INT8."""
_METHOD_SHARE = 0.25
"""Share of the budget after which only quick methods are started."""


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
    """Make versions of ``fp32`` by all methods and layouts, without duplicates or wrong models. Also return notes.

    The INT8 versions need ``calibration``. If matrix products hold most of the weights, the first method also makes versions with one
    scale per product, and versions with symmetric activations. ``look`` measures the layouts before, with ranges from a few samples,
    because ranges do not affect speed. Layouts that are provably slower than ``fp32`` in an engine are not tried in this engine. After
    shares of ``deadline``, the careful method ends, and no further method is tried. If a pass over the calibration data takes too
    long, fewer samples are used. If ``choice.smallest``, versions with weights stored in 16, 8 or 4 bits are made in addition.
    """
    making = _Making(fp32, choice, machine, on_progress, look, deadline or BuildDeadline())
    made, notes = making.integer_versions(calibration)
    if not choice.smallest:
        return made, notes
    failures: dict[str, str] = {}
    stored, lost = making.versions(storing_ways(fp32, calibration), calibration, (), failures)
    missing = (not_tried([name], reason) for name, reason in failures.items())
    return [*made, *stored], (*notes, *missing, *lost)


class _Making(msgspec.Struct, frozen=True):
    """The model, the options and the bounds of ``derived_versions``."""

    fp32: Artifact
    choice: IntegerChoice
    machine: MachineFacts
    on_progress: OnProgress
    look: Look | None
    deadline: BuildDeadline

    def integer_versions(self, calibration: Dataset | None) -> tuple[list[Version], tuple[str, ...]]:
        """The INT8 versions and notes."""
        fp32, choice, scheme, look = self.fp32, self.choice, integer_scheme(self.machine), self.look
        if calibration is None:
            return [], ("INT8 was not tried: there was no calibration data",)
        if not choice.methods and not choice.careful:
            return [], ("INT8 was not tried: no calibration method was requested",)
        if choice.smallest:
            scheme = msgspec.structs.replace(scheme, reduce_range=True)
        options = DynamicOptions(reduce_range=scheme.reduce_range)
        is_dynamic = choice.dynamic and not (choice.engines and set(choice.engines).isdisjoint(FOR_PRODUCTS))
        has_lstm = is_dynamic and has_integer_lstm(fp32, options)
        failures: dict[str, str] = {}
        found, slow, fewer, ways = dict[IntegerLayout, Artifact](), tuple[str, ...](), tuple[str, ...](), list[Way]()
        try:
            few, calibration, fewer = affordable(fp32, calibration, self.deadline)
            found = make_layouts(fp32, few, scheme, choice.engines, failures)
            layouts, slow = promising(fp32, found, look, self.deadline, self.on_progress) if look else (list(found), ())
            if layouts:
                ways = calibrated_ways(fp32, calibration, choice, scheme, layouts, self.deadline, self.on_progress)
        except Unsupported as error:
            if not has_lstm:
                return [], (f"INT8 was not tried: {error.message}",)
            failures["calibration"] = error.message
        if is_dynamic:
            ways = list(dynamic_ways(fp32, calibration, options, ways, has_lstm))
            ways += block_ways(fp32, calibration, look, self.deadline.budget_s) if look and found else []
        ways, stored = with_tables(ways, fp32, next(iter(found.values()), None), choice, look)
        made, notes = self.versions(ways, calibration, required_isa(scheme, self.machine), failures)
        titles = {way.name: way.title for way in ways}
        lacking = (not_tried([titles.get(name, name)], reason) for name, reason in failures.items())
        if not made:
            return [], (*slow, *notes, *([f"INT8 was not tried: {next(iter(failures.values()))}"] if failures else []))
        return made, (f"INT8 on this CPU: {scheme.reason}", *fewer, *slow, *lacking, *notes, *stored)

    def versions(
        self, ways: Sequence[Way], calibration: Dataset | None, requires: tuple[str, ...], failures: dict[str, str]
    ) -> tuple[list[Version], list[str]]:
        """The versions that ``ways`` make, and notes on wrong models and on ways for which there was no time."""
        found, notes, late = dict[str, Version](), list[str](), list[str]()
        titles = {way.name: way.title for way in ways}
        for number, way in enumerate(ways):
            self.on_progress("quantize", number, len(ways))
            is_late = number > 0 and self.deadline.is_past(CAREFUL_SHARE if way.is_quick else _METHOD_SHARE)
            if way.base in late or (is_late and not way.base):
                late.append(way.name)
                continue
            model = attempt(way.name, way.make, failures)
            if model is None or model.digest in found:
                continue
            wrong: dict[str, str] = {}
            attempt(way.name, partial(check_explained, self.fp32, model, calibration), wrong)
            if wrong:
                notes.append(f"{way.title} was dropped: {wrong[way.name]}")
                continue
            is_int8 = way.precision == "int8"
            version = Version(model, way.precision, way.name if is_int8 else "", requires=requires if is_int8 else ())
            found[model.digest] = msgspec.structs.replace(version, engines=way.engines, mixes_rows=way.mixes_rows)
        self.on_progress("quantize", len(ways), len(ways))
        if late:
            notes.append(not_tried([titles[name] for name in late], self.deadline.why_late))
        return list(found.values()), notes


def affordable(
    fp32: Artifact, calibration: Dataset, deadline: BuildDeadline
) -> tuple[Dataset, Dataset, tuple[str, ...]]:
    """A few samples of ``calibration`` for models that are only timed; then ``calibration``, or as many of its samples as can be run
    once within a share of ``deadline``, and a note in this case. Raises Unsupported if these are too few.
    """
    smallest = signature_of(fp32).smallest_batch
    first, second = (calibration.part(n * smallest, (n + 1) * smallest) for n in (0, 1))
    if second.count < smallest:
        return calibration, calibration, ()
    collect(fp32, first)  # loads the model
    start = deadline.used_s
    collect(fp32, second)
    per_sample_s = max((deadline.used_s - start) / second.count, 1e-9)
    most = int(min(_CALIBRATION_SHARE * deadline.budget_s / per_sample_s, calibration.count))
    if _FEWEST_ROWS * per_sample_s > _FEWEST_SHARE * deadline.budget_s:
        raise Unsupported(
            f"calibration takes {per_sample_s:.1f} s per sample, too long for --budget {deadline.budget_s:.0f}s"
        )
    few = calibration.few(max(_FEWEST_ROWS, min(_LOOK_ROWS, most // 2)), smallest)
    if most >= calibration.count:
        return few, calibration, ()
    some = calibration.few(max(few.count, most), smallest)
    note = f"calibrated on {some.count} of {calibration.count} samples, evenly spaced: a larger --budget allows more"
    return few, some, (note,)
