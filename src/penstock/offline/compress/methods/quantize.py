"""``quantize``: convert a trained model to INT8, or store its weights in fewer bits."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from penstock.artifact import Artifact
from penstock.offline.compress.keep_float import keep_float
from penstock.offline.compress.method import Made, Method, StepContext
from penstock.offline.compress.options import Part, Positive, Usage
from penstock.offline.compress.precision.dynamic import DynamicOptions
from penstock.offline.compress.precision.groups import MixedModel
from penstock.offline.compress.precision.half import HalfOptions, halve_weights
from penstock.offline.compress.precision.mixed import choose
from penstock.offline.compress.precision.recurrent import quantize_all_dynamic
from penstock.offline.compress.precision.sensitivity import SensitivityOptions, measure_sensitivity
from penstock.offline.compress.precision.storage import store_in, store_tables
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.ranges.chart import range_chart
from penstock.offline.compress.ptq.ranges.choice import RangeChoiceOptions
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import (
    RANGE_METHODS,
    MethodName,
    PlacementName,
    PtqRecipe,
    check_float,
    placed,
    prepared,
    quantize_with,
)

_INTEGER = ("int8", "int8-dynamic", "int8-weights", "int4-weights")
_INT8 = Usage(needs={"precision": ("int8",)})
_INTEGER_WEIGHTS = Usage(needs={"precision": ("int8", "int8-weights", "int4-weights")})


class QuantizeMethod(Method, frozen=True, kw_only=True):
    """Quantise a model without further training.

    The arrays in the npz files are named after the model's inputs and have one row per sample; an array named `labels` has class
    numbers. int8 and int8-dynamic need --calibrate. --chart draws the search for the range of one tensor. --mixed keeps the loss of
    accuracy within --max-accuracy-loss, measured on a fifth of the calibration data.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "penstock quantize model.onnx --calibrate train.npz --evaluate test.npz -o int8.onnx",
        "penstock quantize model.onnx --precision int4-weights -o int4.onnx",
    )
    data_options: ClassVar[tuple[str, ...]] = ("--calibrate",)

    precision: Literal["int8", "int8-dynamic", "int8-weights", "int4-weights", "fp16-weights", "bf16-weights"] = "int8"
    """int8 calibrates ranges; int8-dynamic computes ranges at run time; all others only store weights in fewer bits."""
    method: MethodName = "best"
    """Calibration method of int8; best chooses a method for each tensor."""
    placement: PlacementName = "fastest"
    """Operators to quantise: linear, attention, wide, or fastest, which measures all."""
    equalize: Annotated[bool, _INTEGER_WEIGHTS] = True
    """Equalise the ranges of channels first; int8-weights and int4-weights need data for it."""
    reconstruct: Annotated[bool, _INTEGER_WEIGHTS] = True
    """Round weights by the error of each layer's results, not to nearest; int8-weights and int4-weights need data for it."""
    bias_correction: bool = True
    """Correct biases for the errors of rounding."""
    mixed: Annotated[bool, _INT8] = False
    """Keep in float those groups of operators that would lose too much accuracy in INT8."""
    max_accuracy_loss: Annotated[Part, Usage(needs={"mixed": ()})] = 0.01
    """Maximum loss of accuracy against the original, e.g. 0.5%."""
    block: Annotated[Literal[16, 32, 64, 128, 256], Usage(needs={"precision": ("int8-weights", "int4-weights")})] = 32
    """Number of weights that share one scale, for int8-weights and int4-weights: 16 to 256."""
    tables: Annotated[bool, Usage(needs={"precision": ("int8", "int8-dynamic")})] = True
    """Also store large embedding tables in INT8."""
    keep_float: Annotated[tuple[str, ...], Usage(needs={"precision": _INTEGER})] = ()
    """Operators and tensors to keep in float: names of the model, in which * stands for any text; may be repeated."""
    chart: Annotated[str | None, Usage("file", writes="picture"), _INT8] = None
    """Also write a chart to this SVG file."""
    chart_tensor: Annotated[
        str | None, Usage(needs={"chart": ()}, default="the tensor on which the methods differ most")
    ] = None
    """Tensor to chart."""
    choice_s: Annotated[Positive | None, Usage("seconds", hidden=True)] = None
    """Maximum time for ``method="best"``; None for no limit."""

    def reason_for_data(self) -> str:
        if self.precision == "int8-dynamic":
            return "int8-dynamic"
        return "int8" if self.precision == "int8" else ""

    def examine(self, model: Artifact) -> None:
        if not self.precision.endswith("16-weights"):
            check_float(model)

    def run(self, model: Artifact, context: StepContext) -> Made:
        model = keep_float(model, context.original, self.keep_float)
        facts: dict[str, Any] = {
            "precision": self.precision,
            "placement": None,
            "float_groups": [],
            "chart": self.chart,
        }
        if self.precision != "int8":
            made, notes = self._without_ranges(model, context)
            return Made(
                self._with_tables(made),
                ("size",) if self.precision.endswith("weights") else ("size", "speed"),
                facts,
                notes,
            )
        start = prepared(model, context, self.equalize)
        files = {}
        if self.chart is not None:
            statistics = collect(start, context.data)
            files[self.chart] = range_chart(statistics, context.scheme, self.chart_tensor).encode()
        placement = placed(start, context, self.placement, self.threads, self.budget_s)
        facts["placement"] = placement.value
        if not self.mixed:
            choice = RangeChoiceOptions(time_s=self.choice_s, threads=self.threads)
            recipe = PtqRecipe(
                RANGE_METHODS.get(self.method),
                placement,
                equalize=False,
                reconstruct=self.reconstruct,
                correct_biases=self.bias_correction,
                choice=choice,
            )
            made = quantize_with(recipe, start, context.data, context.scheme, context.stage("int8"))
            return Made(self._with_tables(made), ("size", "speed"), facts, files=files)
        made, floats, groups = self._mixed(start, placement, context)
        note = f"{len(floats)} of {groups} groups stay in float{': ' if floats else ''}{', '.join(floats)}"
        return Made(self._with_tables(made), ("size", "speed"), facts | {"float_groups": floats}, (note,), files=files)

    def _mixed(self, model: Artifact, placement: QdqPlacement, context: StepContext) -> tuple[Artifact, list[str], int]:
        """The model in mixed precision, the names of its float groups, and the number of all groups."""
        contract = self.allowance(context, self.max_accuracy_loss)
        fitted, judge = context.held_out(self.threads, contract)
        method = RANGE_METHODS.get(self.method, RangeMethod.MSE)
        mixed = MixedModel(model, collect(model, fitted), context.scheme, placement, method)
        trials = Trials(mixed, judge)
        report = measure_sensitivity(trials, SensitivityOptions(budget_s=self.budget_s), context.stage("rank"))
        found = choose(trials, report, contract)
        return found.artifact, list(found.float_groups), len(report.groups)

    def _without_ranges(self, model: Artifact, context: StepContext) -> tuple[Artifact, tuple[str, ...]]:
        match self.precision:
            case "int8-dynamic":
                dynamic = DynamicOptions(reduce_range=context.scheme.reduce_range)
                made = quantize_all_dynamic(model, context.data, dynamic)
                is_invariant = all(step.facts.get("batch_invariant", True) for step in made.provenance)
                note = "the output for a sample depends on the other samples in its batch"
                return made, () if is_invariant else (note,)
            case "int8-weights" | "int4-weights":
                method: Literal["gptq", "nearest"] = "gptq" if self.reconstruct else "nearest"
                bits: Literal[4, 8] = 4 if self.precision == "int4-weights" else 8
                options = WeightOnlyOptions(bits, self.block, method, self.equalize)
                return store_in(model, options, context.fitted), ()
            case _:
                return halve_weights(model, HalfOptions("fp16" if self.precision == "fp16-weights" else "bf16")), ()

    def _with_tables(self, model: Artifact) -> Artifact:
        return store_tables(model) if self.tables and self.precision in ("int8", "int8-dynamic") else model
