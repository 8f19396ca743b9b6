"""``low-rank``: split large layers into low-rank factors."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from penstock.artifact import Artifact
from penstock.offline.compress.low_rank.factorize import FactorizeOptions, factorize
from penstock.offline.compress.method import Made, StepContext, TrainingMethod
from penstock.offline.compress.options import Count, NotNegative, Part, Positive, Usage

_RECOVER = Usage(needs={"recover": ()})


class LowRankMethod(TrainingMethod, frozen=True, kw_only=True):
    """Split matrix products and convolutions into low-rank factors where that saves measured time, within an error bound.

    Needs data; labels are not needed. --recover needs `pip install 'penstock[torch]'` and allows a larger --max-error. Only large
    layers become faster; if none does, the command fails and writes nothing.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "penstock low-rank model.onnx --calibrate train.npz --evaluate test.npz -o thin.onnx",
        "penstock low-rank model.onnx --train train.npz --max-error 15% --recover --evaluate test.npz -o thin.onnx",
    )
    data_options: ClassVar[tuple[str, ...]] = ("--train", "--calibrate")

    max_error: Annotated[Part, Usage(excludes=("rank",))] = 0.05
    """Maximum mean relative error of the outputs."""
    rank: Count | None = None
    """Use this rank for every matrix product instead of choosing ranks by timing."""
    speedup: Annotated[Annotated[float, msgspec.Meta(gt=1)] | None, Usage(excludes=("rank",))] = None
    """Stop at this estimated speed-up of the model, e.g. 1.5."""
    min_ms: NotNegative = FactorizeOptions().min_ms
    """Skip layers that take fewer milliseconds than this."""
    recover: bool = False
    """Train the new layers to reproduce the original's outputs."""
    epochs: Annotated[Positive | None, Usage(default="the method's"), _RECOVER] = None
    resume: Annotated[str | None, Usage("file"), _RECOVER] = None
    learning_rate: Annotated[Positive, Usage(hidden=True)] = 2e-3
    """Peak learning rate of ``recover``."""

    @property
    def trains(self) -> bool:
        return self.recover

    def reason_for_data(self) -> str:
        return "low rank"

    def run(self, model: Artifact, context: StepContext) -> Made:
        options = FactorizeOptions(
            max_error=self.max_error,
            target_speedup=self.speedup,
            rank=self.rank,
            min_ms=self.min_ms,
            threads=self.threads,
        )
        made = context.once(
            "thin",
            lambda: factorize(model, context.data, options, progress=context.stage("factorise")),
            *(model.digest, options),
        )
        facts = made.provenance[-1].facts
        if self.recover:
            made = self.recovered(made, context, learning_rate=self.learning_rate)
        split = {name: way for name, way in facts["layers"].items() if way}
        note = f"{len(split)} layer(s) split; error of the outputs before training: {facts['error']:.2%}"
        return Made(made, ("speed",), {"error": facts["error"], "layers": split}, (note,))
