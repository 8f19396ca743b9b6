"""Ways: the methods that quantise a model in the layouts that may be faster, in the order in which a build tries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.titles import precision_title
from penstock.dataset import Dataset
from penstock.measurement import times
from penstock.offline.compress.method import OnProgress
from penstock.offline.compress.precision.dynamic import DynamicOptions
from penstock.offline.compress.precision.half import halve_weights
from penstock.offline.compress.precision.products import share_of_products
from penstock.offline.compress.precision.recurrent import quantize_all_dynamic, quantize_recurrent
from penstock.offline.compress.precision.storage import share_of_tables, store_in, store_tables, store_weights
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, improved, quantize_weights
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.choice import RangeChoiceOptions
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.versions.attempt import attempt
from penstock.offline.compress.versions.layouts import FOR_PRODUCTS, MOSTLY, IntegerLayout, Look, fastest
from penstock.offline.deadline import BuildDeadline
from penstock.offline.sessions import signature_of

CAREFUL_SHARE = 0.45
"""Share of the budget after which the careful method ends, and no quick method is started."""
_CHOICE_S = 4.0
"""Time limit in seconds for choosing range methods. The remaining tensors get the range of least squared error."""
_RECONSTRUCT_SHARE = 0.05
"""Maximum share of the budget for rounding weights by the results of layers, and for scaling the channels of weights in blocks. The
remaining weights are rounded to nearest."""
_LARGE_TABLES = 0.1
"""Embedding tables are stored in INT8 if they hold more than this fraction of the model's bytes, or if only the size matters."""
_BLOCKS = {8: WeightOnlyOptions(8, 128), 4: WeightOnlyOptions(4, 32)}
"""The weight-only versions, by bits. Large blocks are faster, small ones more accurate."""
_QUICKEST = RangeMethod.MSE, RangeMethod.PERCENTILE, RangeMethod.MIN_MAX, RangeMethod.ENTROPY
"""The methods that only choose ranges, the most accurate first."""


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


class Way(NamedTuple):
    """A way to quantise. The other fields describe the version that it makes."""

    name: str
    make: Callable[[], Artifact]
    engines: tuple[str, ...] = ()
    mixes_rows: bool = False
    is_first: bool = True
    """True for the most accurate way of a layout."""
    is_quick: bool = False
    """True for a way that needs little time, and whose version may be the fastest in an engine."""
    precision: str = "int8"
    base: str = ""
    """The way whose result this way changes. It then costs little, so it is tried exactly if that way was tried."""

    @property
    def title(self) -> str:
        return precision_title("int8", self.name) if self.precision == "int8" else self.name


def calibrated_ways(
    fp32: Artifact,
    calibration: Dataset,
    choice: IntegerChoice,
    scheme: IntegerScheme,
    layouts: Sequence[IntegerLayout],
    deadline: BuildDeadline,
    on_progress: OnProgress,
) -> list[Way]:
    """The ways to quantise: first a quick one, so that there is a result, then the careful method for each layout, then the others."""
    statistics = collect(fp32, calibration, progress=lambda done, total: on_progress("calibrate", done, total))
    by_method = {method: ranges(statistics, method, scheme) for method in choice.methods}

    def make(method: RangeMethod | None, layout: IntegerLayout) -> Artifact:
        written = layout.scheme(scheme)
        if method is not None:
            return quantize(fp32, by_method[method], written, layout.placement)
        late = partial(deadline.is_past, CAREFUL_SHARE)
        limits, reconstruct_s = RangeChoiceOptions(time_s=_CHOICE_S), _RECONSTRUCT_SHARE * deadline.budget_s
        recipe = PtqRecipe(placement=layout.placement, choice=limits, reconstruct_s=reconstruct_s)
        return quantize_with(recipe, fp32, calibration, scheme, written=written, is_late=late)

    tried: list[RangeMethod | None] = [*([None] if choice.careful else []), *choice.methods[::-1]]
    first, *others = tried
    quick = next((method for method in _QUICKEST if method in choice.methods), first)
    quickly = [(quick, layout) for layout in fastest(layouts, choice.engines)]
    ways = [*quickly, *((first, layout) for layout in layouts)]
    ways += [(method, layout) for method in others for layout in layouts if not layout.kind]
    return [
        Way(
            f"{method.value if method else 'best'}-{layout.name}",
            cache(partial(make, method, layout)),
            layout.engines,
            is_first=method is first,
            is_quick=(method, layout) in quickly,
        )
        for method, layout in dict.fromkeys(ways)
    ]


def dynamic_ways(
    fp32: Artifact, calibration: Dataset, options: DynamicOptions, calibrated: Sequence[Way], has_lstm: bool
) -> Iterator[Way]:
    """The ``calibrated`` ways, and those with ranges computed at run time: for LSTMs of the best versions, and for all operators."""
    mixes_rows = signature_of(fp32).batchable
    for way in calibrated:
        yield way
        runs = not way.engines or not set(way.engines).isdisjoint(FOR_PRODUCTS)
        if has_lstm and runs and (way.is_first or way.is_quick):
            make = partial(_with_recurrent, way.make, calibration, options)
            yield Way(f"{way.name}-lstm", make, FOR_PRODUCTS, mixes_rows, base=way.name)
    share = attempt("dynamic", partial(share_of_products, fp32, recurrent=True), {})
    if share is not None and share > MOSTLY:
        make = partial(quantize_all_dynamic, fp32, calibration, options)
        yield Way("dynamic", make, FOR_PRODUCTS, mixes_rows, is_quick=True)


def _with_recurrent(make: Callable[[], Artifact], calibration: Dataset, options: DynamicOptions) -> Artifact:
    return quantize_recurrent(make(), calibration, options)


def block_ways(fp32: Artifact, calibration: Dataset, look: Look, budget_s: float) -> Iterator[Way]:
    """The ways to quantise only the weights of large matrix products, if these hold most of the weights and this may be faster."""
    for bits, options in _BLOCKS.items() if share_of_products(fp32) > MOSTLY else ():
        made = attempt("blocks", partial(quantize_weights, fp32, None, options), {})
        speeds = look(fp32, made, FOR_PRODUCTS) if made is not None else {}
        if made is not None and any(one.high >= 1 for one in speeds.values()):
            name, make = (
                f"int{bits}-weights",
                partial(improved, fp32, made, calibration, options, _RECONSTRUCT_SHARE * budget_s),
            )
            yield Way(name, make, FOR_PRODUCTS, is_first=False, precision=name)


def storing_ways(fp32: Artifact, calibration: Dataset | None) -> list[Way]:
    """The ways to store weights in 16, 8 or 4 bits, which are computed with in FP32."""
    makers = {
        "int8-weights": partial(store_weights, fp32),
        "fp16-weights": partial(halve_weights, fp32),
        "int4-weights": partial(store_in, fp32, _BLOCKS[4], calibration),
    }
    return [Way(name, make, FOR_PRODUCTS, precision=name) for name, make in makers.items()]


def with_tables(
    ways: list[Way], fp32: Artifact, int8: Artifact | None, choice: IntegerChoice, look: Look | None
) -> tuple[list[Way], tuple[str, ...]]:
    """``ways``, which also store embedding tables in INT8 if this is worthwhile, and a note. ``int8`` is a version for timing."""
    share = share_of_tables(fp32)
    if share <= (0 if choice.smallest else _LARGE_TABLES):
        return ways, ()
    speeds = look(int8, store_tables(int8), choice.engines) if look and int8 is not None else {}
    slower = [f"{times(one)} on {engine}" for engine, one in speeds.items() if one.high < 1]
    if slower and len(slower) == len(speeds):
        return ways, (f"embedding tables stay FP32, because INT8 tables are slower: {', '.join(slower)}",)
    stored = [way._replace(make=partial(_with_tables, way.make)) for way in ways]
    return stored, (f"INT8 versions store embedding tables, {share:.0%} of the model, in INT8",)


def _with_tables(make: Callable[[], Artifact]) -> Artifact:
    return store_tables(make())
