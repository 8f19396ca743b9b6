"""``share``: cluster the weights of each layer onto a few shared values."""

from __future__ import annotations

import lzma
import zlib
from typing import Annotated, Any, ClassVar

import msgspec

from penstock.artifact import Artifact
from penstock.bundle import coded
from penstock.dataset import Dataset
from penstock.errors import EngineUnavailable, ResourceExhausted, Unsupported
from penstock.offline.compress.method import Made, StepContext, TrainingMethod, needs_torch
from penstock.offline.compress.options import Count, Part, Positive, Usage
from penstock.offline.compress.sharing.bits import BitsOptions, choose_bits
from penstock.offline.compress.sharing.share import MAX_BITS, ShareOptions, share
from penstock.offline.optimize.model import check_one_file
from penstock.offline.sessions import signature_of

_LZMA_BYTES = 64 << 20
"""Maximum size of a model, in bytes, for the comparison with lzma, which takes a second per MiB."""
_MIN_ROWS, _MAX_VALUES = 32, 1 << 22
"""If ``most_rows`` is set, at most ``_MAX_VALUES`` input values are used, but always ``_MIN_ROWS`` samples."""

_Bits = Annotated[int, msgspec.Meta(ge=0, le=MAX_BITS)]


class ShareMethod(TrainingMethod, frozen=True, kw_only=True):
    """Cluster the weights of each layer onto a few shared values, so that the coded model becomes small.

    The ONNX file keeps its size. --coded also writes a coded model (codebooks and Huffman codes); --decode restores the identical ONNX
    file from it. Prune first: zeros take almost no space. --tune needs --train and `pip install 'penstock[torch]'`.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "penstock share pruned.onnx --train train.npz --tune --evaluate test.npz -o shared.onnx --coded model.coded",
        "penstock share model.coded --decode -o model.onnx",
    )

    bits: _Bits = ShareOptions().fc_bits
    """Bits per weight of matrix products, for 2 ** bits values; 0 skips them."""
    conv_bits: _Bits = ShareOptions().conv_bits
    """Bits per weight of convolutions, for 2 ** bits values; 0 skips them."""
    by_sensitivity: bool = False
    """Choose the fewest bits for each layer by the layer's sensitivity, measured on --train."""
    tune: bool = False
    """Train the shared values to reproduce the original's outputs."""
    coded: Annotated[str | None, Usage("file", writes="coded model")] = None
    """Also write the coded model to this file."""
    epochs: Annotated[Positive | None, Usage(default="the method's", needs={"tune": ()})] = None
    resume: Annotated[str | None, Usage(hidden=True)] = None
    layer_error: Annotated[Part, Usage(hidden=True)] = 0.02
    """With ``by_sensitivity``: maximum relative error that one layer may cause in an output."""
    layer_loss: Annotated[Part, Usage(hidden=True)] = 0.1
    """With ``by_sensitivity``: maximum fraction of ``max_accuracy_loss`` that one layer may use."""
    max_accuracy_loss: Annotated[Part, Usage(hidden=True)] = 0.01
    """Maximum loss of accuracy against the original."""
    most_rows: Annotated[Count | None, Usage(hidden=True)] = None
    """With ``by_sensitivity``: maximum number of samples. If samples are large, fewer are used."""
    tune_optional: Annotated[bool, Usage(hidden=True)] = False
    """Keep the untrained model if training is impossible."""

    @property
    def trains(self) -> bool:
        return self.tune and not self.tune_optional

    @property
    def needs_fp32(self) -> bool:
        return self.trains

    def reason_for_data(self) -> str:
        return "--tune" if self.tune else "--by-sensitivity" if self.by_sensitivity else ""

    def examine(self, model: Artifact) -> None:
        check_one_file(model, "share")

    def run(self, model: Artifact, context: StepContext) -> Made:
        options = ShareOptions(conv_bits=self.conv_bits, fc_bits=self.bits)
        if self.by_sensitivity:
            contract = self.allowance(context, self.max_accuracy_loss)
            loss = self.layer_loss * contract.max_accuracy_loss
            bounds = BitsOptions(max_relative_error=self.layer_error, max_accuracy_loss=loss, threads=self.threads)
            data = self._rows(model, context.data)
            options = choose_bits(model, data, bounds, options, context.stage("bits"), contract)
        made = share(model, options, context.stage("share"))
        if self.tune:
            made = self._tuned(made, context)
        facts: dict[str, Any] = {"bits": options.bits, "coded": self.coded}
        if context.contract is not None:  # a plan measures the sizes itself
            return Made(made, ("coded_size",), facts)
        sizes = _sizes({"original": context.teacher, "optimised": model, "shared": made})
        return Made(
            made,
            ("coded_size",),
            {"sizes": sizes, **facts},
            (f"coded model in {self.coded}",) if self.coded else (),
            files={self.coded: coded.encode(made.data)} if self.coded else {},
            table=(
                ("KiB", "file", "zlib", "lzma", "coded"),
                *(
                    (name, *(f"{size / 1024:.1f}" if size else "–" for size in row.values()))
                    for name, row in sizes.items()
                ),
            ),
        )

    def _tuned(self, made: Artifact, context: StepContext) -> Artifact:
        try:
            tuning = needs_torch("sharing.centroid_tuning")
            context.check_memory(made)
            options = tuning.CentroidOptions(self.fit(tuning.CentroidOptions().fit))
            tuned: Artifact = tuning.tune_centroids(made, context.teacher, context.data, options, context.stage("tune"))
        except (EngineUnavailable, Unsupported, ResourceExhausted):
            if not self.tune_optional:
                raise
            return made
        return tuned

    def _rows(self, model: Artifact, data: Dataset) -> Dataset:
        if self.most_rows is None:
            return data
        values = sum(array.size for array in data.sample(0).values())
        rows = max(_MIN_ROWS, min(self.most_rows, _MAX_VALUES // max(1, values)))
        return data if data.count <= rows else data.split(1 - rows / data.count, signature_of(model).smallest_batch)[0]


def _sizes(models: dict[str, Artifact]) -> dict[str, dict[str, int | None]]:
    """The size of each model uncompressed, compressed by zlib and lzma, and coded."""
    return {
        name: {
            "file_bytes": model.size_bytes,
            "zlib_bytes": len(zlib.compress(model.data, 9)),
            "lzma_bytes": len(lzma.compress(model.data)) if model.size_bytes <= _LZMA_BYTES else None,
            "coded_bytes": len(coded.encode(model.data)),
        }
        for name, model in models.items()
    }
