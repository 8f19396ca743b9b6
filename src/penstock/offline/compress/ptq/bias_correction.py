"""Bias correction: rounding weights and activations shifts the mean of a layer's results; its bias takes that back.

M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, §4.2, in the empirical
form of its appendix D: b -= E[Wq x̂ - W x] for each output channel, layer by layer in the graph's order, x̂ coming from the layers
that are corrected already. Both models run over the data; only means are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, InvalidData, Unsupported
from penstock.offline.compress.ptq.placement import FloatModel
from penstock.offline.compress.sessions import answers_of, signature_of
from penstock.offline.compress.taps import Progress, Taps, no_progress
from penstock.offline.dataset import Dataset, make_dataset
from penstock.offline.optimize.model import read_proto
from penstock.offline.tune.accuracy import Outputs, sample_errors
from penstock.tensor import Array

_LINEAR = frozenset({"Conv", "Gemm", "MatMul"})
_INT32 = np.iinfo(np.int32)


class BiasCorrectionOptions(msgspec.Struct, frozen=True):
    """How to correct biases."""

    held_out: float = 0.25
    """Share of the samples that no mean is taken of: corrections stay if the outputs' error on them falls."""
    samples: int = 256
    """No more samples than this are used, the first; some 50 are enough for means."""
    batch_size: int = 32
    threads: int = 1


_DEFAULTS = BiasCorrectionOptions()


def correct_biases(
    original: Artifact,
    quantised: Artifact,
    data: Dataset,
    options: BiasCorrectionOptions = _DEFAULTS,
    progress: Progress = no_progress,
) -> Artifact:
    """``quantised``, made by ``quantize`` from ``original``, with biases that make the layers' means those of ``original``.

    All are corrected if that lowers the mean relative error of the outputs on samples held out, and else each only if it does;
    then ``progress`` starts again. INT32 biases keep
    their scale; a Conv or Gemm without a bias gets one, which its integer kernel adds for nothing; a MatMul is corrected in the
    constant that an Add after it adds. Raises Unsupported if no quantised layer of ``original`` is found in ``quantised``,
    InvalidData if the data do not fit or are fewer than two samples.
    """
    rows = min(options.samples, data.count)
    if rows < 2:
        raise InvalidData("bias correction needs samples to correct with and others to check with", "give at least 2")
    if not 0 < options.held_out < 1:
        raise InvalidArgument(f"the share held out is {options.held_out}", "give one between 0 and 1")
    known = FloatModel(original).proto
    model = _Quantised(read_proto(quantised), known)
    plain = Artifact.from_bytes(known.SerializeToString(deterministic=True))
    fit, held_out = _split(data, rows, options.held_out, plain)
    wanted = _means(plain, fit, {pair.wanted: pair.axis for pair in model.pairs}, options)
    reference = _answers(plain, held_out, options)

    def error(model: _Quantised) -> float:
        return float(sample_errors(reference, _answers(model.artifact(), held_out, options)).mean())

    first = error(model)
    for judged in (None, error):
        model = _Quantised(read_proto(quantised), known)
        left = _correct(model, wanted, partial(_mean, fit, options), judged, progress)
        best = error(model)
        if best < first:
            break
    corrected = [pair.name for pair in model.pairs if pair.name not in left]
    asked = {**msgspec.structs.asdict(options), "data": data.digest, "original": original.digest}
    facts = {"error": [first, best], "layer_by_layer": judged is not None, "corrected": corrected, "left": left}
    return quantised.derive(model.artifact().data, "correct-biases", asked, facts)


def _correct(
    model: _Quantised,
    wanted: Mapping[str, Array],
    mean: Callable[[Artifact, _Pair], Array],
    error: Callable[[_Quantised], float] | None,
    progress: Progress,
) -> dict[str, str]:
    """Correct the layers in order, each only if ``error`` falls where that is given; those left as they were, and why."""
    best = None if error is None else error(model)
    left: dict[str, str] = {}
    for number, pair in enumerate(model.pairs, 1):
        reason = model.shift(pair, wanted[pair.wanted] - mean(model.artifact(), pair))
        if not reason and error is not None and best is not None:
            after = error(model)
            reason = "" if after < best else "the outputs' error does not fall"
            best = min(best, after)
        if reason:
            model.undo()
            left[pair.name] = reason
        progress(number, len(model.pairs))
    return left


class _Pair(NamedTuple):
    """A layer in both models."""

    name: str
    """The node's, in both."""
    wanted: str
    """The float model's tensor."""
    found: str
    """The quantised model's, before it is rounded."""
    axis: int
    """Of its channels."""


class _Quantised:
    """A QDQ model whose biases are edited."""

    def __init__(self, proto: onnx.ModelProto, original: onnx.ModelProto) -> None:
        self._proto = proto
        self._before = b""
        written = {name: node for node in proto.graph.node for name in node.output}
        known = {node.name: node for node in original.graph.node if node.op_type in _LINEAR}
        self.pairs = [
            _Pair(node.name, known[node.name].output[0], node.output[0], 1 if node.op_type == "Conv" else -1)
            for node in proto.graph.node
            if node.name in known
            and node.op_type == known[node.name].op_type
            and (source := written.get(node.input[1])) is not None
            and source.op_type == "DequantizeLinear"
            and any(source.input[0] == tensor.name for tensor in proto.graph.initializer)
        ]
        if not self.pairs:
            raise Unsupported(
                "no layer of the original is quantised in the other model",
                "give a model that quantize() made, and the very model that it was made from",
            )

    def artifact(self) -> Artifact:
        return Artifact.from_bytes(bytes(self._proto.SerializeToString(deterministic=True)))

    def undo(self) -> None:
        """Take the last shift back."""
        self._proto = onnx.load_model_from_string(self._before)

    def shift(self, pair: _Pair, by: Array) -> str:
        """Add ``by``, one number a channel, to a layer's bias; says why it cannot be done, or nothing."""
        self._before = self._proto.SerializeToString(deterministic=True)
        reason = self._shift(pair, by)
        self._sweep()
        return reason

    def _shift(self, pair: _Pair, by: Array) -> str:
        node = next(node for node in self._proto.graph.node if node.name == pair.name)
        if node.op_type == "MatMul":
            readers = [other for other in self._proto.graph.node if node.output[0] in other.input]
            if len(readers) != 1 or readers[0].op_type != "Add":
                return "a MatMul without an addition of its own after it"
            return self._shift_float(readers[0], int(readers[0].input[0] == node.output[0]), by)
        if any(attribute.name in ("alpha", "beta") and attribute.f != 1 for attribute in node.attribute):
            return "a Gemm that scales its product or its bias"
        if len(node.input) < 3 or not node.input[2]:
            return self._insert(node, by)
        source = self._writer(node.input[2])
        return self._shift_float(node, 2, by) if source is None else self._shift_integers(node, source, by)

    def _shift_integers(self, node: onnx.NodeProto, source: onnx.NodeProto, by: Array) -> str:
        integers, scale = self._array(source.input[0]), self._array(source.input[1])
        if source.op_type != "DequantizeLinear" or integers is None or scale is None or integers.dtype != np.int32:
            return "a bias that is not constant"
        return self._put(node, by, integers, scale)

    def _shift_float(self, node: onnx.NodeProto, index: int, by: Array) -> str:
        bias = self._array(node.input[index])
        if bias is None or bias.dtype != np.float32 or bias.size != by.size or bias.shape[-1] != by.size:
            return "nothing constant in FP32 is added to it"
        node.input[index] = self._constant(f"{node.input[index]}", (bias + by.reshape(bias.shape)).astype(np.float32))
        return ""

    def _insert(self, node: onnx.NodeProto, by: Array) -> str:
        """A bias for a node that has none, in the scale that integer kernels demand: input times weight."""
        scales = [self._array(source.input[1]) for name in node.input[:2] if (source := self._writer(name)) is not None]
        if len(scales) < 2 or scales[0] is None or scales[1] is None:
            return "its scales are not constant"
        scale = np.asarray(scales[0] * scales[1], np.float32)
        del node.input[2:]
        node.input.append("")
        return self._put(node, by, np.zeros(by.size, np.int32), scale)

    def _put(self, node: onnx.NodeProto, by: Array, integers: Array, scale: Array) -> str:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            shifted = integers + np.round(by / scale.astype(np.float64))
        if not np.isfinite(shifted).all() or np.abs(shifted).max() > _INT32.max:
            return "the bias would not fit INT32 in its scale"
        like = f"{node.name}_bias"
        inputs = [self._constant(like, shifted.astype(np.int32)), self._constant(f"{like}_scale", scale)]
        node.input[2] = self._free(f"{like}_corrected")
        dequantise = onnx.helper.make_node("DequantizeLinear", inputs, [node.input[2]], name=node.input[2], axis=0)
        graph = self._proto.graph
        graph.node.insert(next(at for at, other in enumerate(graph.node) if other.name == node.name), dequantise)
        return ""

    def _constant(self, like: str, array: Array) -> str:
        name = self._free(f"{like}_corrected")
        self._proto.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _free(self, name: str) -> str:
        graph = self._proto.graph
        taken = {tensor.name for tensor in graph.initializer} | {name for node in graph.node for name in node.output}
        return next(free for number in itertools.count() if (free := f"{name}{number or ''}") not in taken)

    def _writer(self, tensor: str) -> onnx.NodeProto | None:
        return next((node for node in self._proto.graph.node if tensor in node.output), None)

    def _array(self, tensor: str) -> Array | None:
        found = next((known for known in self._proto.graph.initializer if known.name == tensor), None)
        return None if found is None else numpy_helper.to_array(found)

    def _sweep(self) -> None:
        """Remove a bias that nothing reads any more."""
        graph = self._proto.graph
        read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
        for node in [node for node in graph.node if node.op_type == "DequantizeLinear" and node.output[0] not in read]:
            graph.node.remove(node)
        read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
        for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
            graph.initializer.remove(tensor)


def _split(data: Dataset, rows: int, held_out: float, artifact: Artifact) -> tuple[Dataset, Dataset]:
    multiple = signature_of(artifact).smallest_batch
    return make_dataset(data.rows(0, rows - rows % multiple), None).split(held_out, multiple)


def _means(artifact: Artifact, data: Dataset, axes: dict[str, int], options: BiasCorrectionOptions) -> dict[str, Array]:
    """The mean of every channel of the tensors in ``axes``, which says where their channels are; FP64."""
    sums: dict[str, Array] = {}
    counts = dict.fromkeys(axes, 0)
    for name, array in Taps(artifact, data, batch_size=options.batch_size, threads=options.threads).run(list(axes)):
        rows = np.moveaxis(array, axes[name], -1).reshape(-1, array.shape[axes[name]])
        sums[name] = sums.get(name, 0.0) + rows.sum(axis=0, dtype=np.float64)
        counts[name] += len(rows)
    return {name: total / counts[name] for name, total in sums.items()}


def _mean(data: Dataset, options: BiasCorrectionOptions, artifact: Artifact, pair: _Pair) -> Array:
    return _means(artifact, data, {pair.found: pair.axis}, options)[pair.found]


def _answers(artifact: Artifact, data: Dataset, options: BiasCorrectionOptions) -> Outputs:
    return answers_of(artifact, data, options.threads, batch_size=options.batch_size, as_written=True)
