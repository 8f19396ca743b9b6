"""One-bit weights: replace the weights of a trained network's inner layers by their signs and one scale per output channel.

    pip install -e '.[torch]'
    python examples/binary_network/binary.py examples/digits/model.onnx examples/digits/calibrate.npz examples/digits/evaluate.npz

A weight becomes ``a sign(w)``, where ``a`` is the mean magnitude of its channel. Gradients pass straight through where |w| <= 1
[Rastegari et al., "XNOR-Net", 2016, §3.1]. The first and the last layer stay FP32, as in the paper. The original model is the teacher;
labels are used too.
"""

import argparse
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.offline.compress.training.distill import recover
from penstock.offline.compress.training.fit import FitOptions
from penstock.offline.compress.training.torch import Tensor, torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.judge.judge import Comparison, Judge
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.optimizer import optimize
from penstock.offline.sessions import signature_of
from penstock.samples.open import load_dataset


class Result(msgspec.Struct):
    """The binary model and its measurements."""

    untrained: Comparison
    trained: Comparison
    artifact: Artifact
    binary_weights: int
    float_weights: int

    @property
    def packed_bytes(self) -> int:
        """Size in a format that stores one bit per binary weight, and all other weights and the scales in FP32."""
        return self.binary_weights // 8 + 4 * self.float_weights


def binary(channel_axis: int) -> Callable[[Tensor], Tensor]:
    """A weight hook: the signs, scaled by the mean magnitude of each output channel."""

    def hook(weight: Tensor) -> Tensor:
        others = [axis for axis in range(weight.ndim) if axis != channel_axis]
        scale = weight.abs().mean(others, keepdim=True).detach()
        through = torch.clamp(weight, -1, 1)
        signs = torch.where(weight >= 0, 1.0, -1.0)
        return scale * (through + (signs - through).detach())

    return hook


def binarize(teacher: Artifact, train: Dataset, test: Dataset, options: FitOptions) -> Result:
    """Makes the inner convolutions of ``teacher`` binary, with BatchNormalization folded. Returns the model before and after
    training."""
    original, _ = optimize(teacher, [train.rows(0, 8)])
    model = TrainableModel(original)
    read = [name for node in read_proto(original).graph.node for name in node.input]
    matrices = [name for name in read if name in model.weights and model.weights[name].ndim > 1]
    inner = [name for name in dict.fromkeys(matrices[1:-1]) if model.weights[name].ndim == 4]
    for name in inner:
        model.weight_hooks[name] = binary(channel_axis=0)
    untrained = model.to_artifact("binarize", {}, {})
    report = recover(model, train, original, options)
    trained = model.to_artifact("binarize", msgspec.to_builtins(options), report.facts())
    count = sum(model.weights[name].numel() for name in inner)
    scales = sum(len(model.weights[name]) for name in inner)
    rest = sum(weight.numel() for weight in model.weights.values()) - count + scales
    before, after = (Judge(original, test).compare(artifact, budget_s=1.0) for artifact in (untrained, trained))
    return Result(before, after, trained, count, rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--epochs", type=float, default=200)
    given = parser.parse_args()
    artifact = Artifact.from_file(given.model)
    train, test = (load_dataset(path, signature_of(artifact)) for path in (given.train, given.test))
    found = binarize(artifact, train, test, FitOptions(epochs=given.epochs, learning_rate=5e-3))
    share = found.binary_weights / (found.binary_weights + found.float_weights)
    print(f"binary weights   {found.binary_weights} ({share:.1%})")
    before, after = found.untrained.accuracy.value, found.trained.accuracy.value
    print(f"accuracy         {found.trained.original_accuracy:.2%} FP32, {before:.2%} untrained, {after:.2%} trained")
    print(f"packed           {found.packed_bytes} bytes, FP32 {found.trained.original_bytes}")
    print(f"ONNX file        {found.artifact.size_bytes} bytes, {len(zlib.compress(found.artifact.data, 9))} with zlib")
    print(f"speed            {found.trained.speedup.value:.2f} times FP32: ONNX Runtime has no kernel for bits")


if __name__ == "__main__":
    main()
