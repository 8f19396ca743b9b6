"""Bias correction: rounding weights and activations shifts the mean of a layer's results; its bias takes that back.

M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, §4.2, in the empirical
form of its appendix D: b -= E[Wq x̂ - W x] for each output channel, layer by layer in the graph's order, x̂ coming from the layers
that are corrected already. Both models run over the data; only means are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, InvalidData, Unsupported
from penstock.offline.compress.ptq.qdq_placement import LINEAR_OPS, FloatModel
from penstock.offline.compress.taps import Progress, Taps, no_progress
from penstock.offline.dataset import Dataset, make_dataset
from penstock.offline.judge.accuracy import answers_of
from penstock.offline.judge.metrics import Outputs, sample_errors
from penstock.offline.optimize import graph
from penstock.offline.optimize.model import load_model, to_bytes
from penstock.offline.optimize.passes.dead_code import DeadCode
from penstock.offline.sessions import signature_of
from penstock.tensor import Array

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
    known = FloatModel(original)
    layers, plain = _layers(quantised, known), known.artifact()
    multiple = signature_of(plain).smallest_batch
    fit, held_out = make_dataset(data.rows(0, rows - rows % multiple), None).split(options.held_out, multiple)
    wanted = _means(plain, fit, {layer.wanted: layer.axis for layer in layers}, options)
    reference = _answers(plain, held_out, options)

    def error(model: Artifact) -> float:
        return float(sample_errors(reference, _answers(model, held_out, options)).mean())

    def excess(model: Artifact, layer: _Layer) -> Array:
        return _means(model, fit, {layer.found: layer.axis}, options)[layer.found] - wanted[layer.wanted]

    first = error(quantised)
    for judged in (None, error):
        corrected, left = _correct(quantised, layers, excess, judged, progress)
        best = error(corrected)
        if best < first:
            break
    asked = {**msgspec.structs.asdict(options), "data": data.digest, "original": original.digest}
    facts = {
        "error": [first, best],
        "layer_by_layer": judged is not None,
        "corrected": [layer.name for layer in layers if layer.name not in left],
        "left": left,
    }
    return quantised.derive(corrected.data, "correct-biases", asked, facts)


class _Layer(NamedTuple):
    """A layer that is there in both models."""

    name: str
    """The node's, in both."""
    wanted: str
    """The float model's tensor."""
    found: str
    """The quantised model's, before it is rounded."""
    axis: int
    """Of its channels."""


def _layers(quantised: Artifact, original: FloatModel) -> list[_Layer]:
    known = {node.name: node for node in original.nodes if node.op_type in LINEAR_OPS}
    found = [
        _Layer(
            f"{node.name}", known[node.name].output[0], f"{node.outputs[0].name}", 1 if node.op_type == "Conv" else -1
        )
        for node in load_model(quantised).graph
        if node.name in known and node.op_type == known[node.name].op_type and _has_integer_weights(node)
    ]
    if not found:
        raise Unsupported(
            "no layer of the original is quantised in the other model",
            "give a model that quantize() made, and the very model that it was made from",
        )
    return found


def _has_integer_weights(node: ir.Node) -> bool:
    weight = graph.input_of(node, 1)
    source = None if weight is None else weight.producer()
    return source is not None and source.op_type == "DequantizeLinear" and _read_by(source, 0) is not None


def _correct(
    model: Artifact,
    layers: Sequence[_Layer],
    excess: Callable[[Artifact, _Layer], Array],
    error: Callable[[Artifact], float] | None,
    progress: Progress,
) -> tuple[Artifact, dict[str, str]]:
    """Correct the layers in order, each only if ``error`` falls where that is given; those left as they were, and why."""
    best = None if error is None else error(model)
    left: dict[str, str] = {}
    for number, layer in enumerate(layers, 1):
        try:
            corrected = _lowered(model, layer.name, excess(model, layer))
            if error is not None and best is not None:
                after = error(corrected)
                if after >= best:
                    raise Unsupported("the outputs' error does not fall")
                best = after
            model = corrected
        except Unsupported as refusal:
            left[layer.name] = refusal.message
        progress(number, len(layers))
    return model, left


def _lowered(artifact: Artifact, name: str, by: Array) -> Artifact:
    """The model with ``by``, one number a channel, subtracted from that layer's bias. Raises Unsupported if that cannot be done."""
    model = load_model(artifact)
    node = next(node for node in model.graph if node.name == name)
    if node.op_type == "MatMul":
        reader = graph.sole_consumer(node.outputs[0])
        if reader is None or reader.op_type != "Add":
            raise Unsupported("a MatMul without an addition of its own after it")
        _lower_float(reader, int(reader.inputs[0] is node.outputs[0]), by)
    else:
        _lower_bias(node, by)
    DeadCode().call(model)
    return Artifact.from_bytes(to_bytes(model))


def _lower_bias(node: ir.Node, by: Array) -> None:
    if any(graph.float_attribute(node, name, 1.0) != 1 for name in ("alpha", "beta")):
        raise Unsupported("a Gemm that scales its product or its bias")
    bias = graph.input_of(node, 2)
    source = None if bias is None else bias.producer()
    if bias is None:
        # A new one, in the scale that integer kernels demand: input times weight.
        scales = [_read_by(value.producer(), 1) for value in node.inputs[:2] if value is not None]
        if len(scales) < 2 or scales[0] is None or scales[1] is None:
            raise Unsupported("its scales are not constant")
        _lower_integers(node, by, np.zeros(by.size, np.int32), np.asarray(scales[0] * scales[1], np.float32))
    elif source is None:
        _lower_float(node, 2, by)
    else:
        integers, scale = _read_by(source, 0), _read_by(source, 1)
        if source.op_type != "DequantizeLinear" or integers is None or scale is None or integers.dtype != np.int32:
            raise Unsupported("a bias that is not constant")
        _lower_integers(node, by, integers, scale)


def _read_by(node: ir.Node | None, index: int) -> Array | None:
    return None if node is None else graph.constant(graph.input_of(node, index))


def _lower_float(node: ir.Node, index: int, by: Array) -> None:
    value, bias, owner = node.inputs[index], _read_by(node, index), node.graph
    assert isinstance(owner, ir.Graph)
    if value is None or bias is None or bias.dtype != np.float32 or (bias.size, *bias.shape[-1:]) != (by.size, by.size):
        raise Unsupported("nothing constant in FP32 is added to it")
    lowered = (bias - by.reshape(bias.shape)).astype(np.float32)
    node.replace_input_with(index, graph.add_constant(owner, lowered, f"{value.name}"))


def _lower_integers(node: ir.Node, by: Array, integers: Array, scale: Array) -> None:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        lowered = integers - np.round(by / scale.astype(np.float64))
    if not np.isfinite(lowered).all() or np.abs(lowered).max() > _INT32.max:
        raise Unsupported("the bias would not fit INT32 in its scale")
    owner = node.graph
    assert isinstance(owner, ir.Graph)
    constants = [graph.add_constant(owner, array, f"{node.name}_bias") for array in (lowered.astype(np.int32), scale)]
    name = f"{constants[0].name}_dequantized"
    dequantise = ir.Node("", "DequantizeLinear", constants, [ir.AttrInt64("axis", 0)], num_outputs=1, name=name)
    dequantise.outputs[0].name = name
    owner.insert_before(node, dequantise)
    node.resize_inputs(3)
    node.replace_input_with(2, dequantise.outputs[0])


def _means(artifact: Artifact, data: Dataset, axes: dict[str, int], options: BiasCorrectionOptions) -> dict[str, Array]:
    """The mean of every channel of the tensors in ``axes``, which says where their channels are; FP64."""
    sums: dict[str, Array] = {}
    counts = dict.fromkeys(axes, 0)
    for name, array in Taps(artifact, data, batch_size=options.batch_size, threads=options.threads).run(list(axes)):
        rows = np.moveaxis(array, axes[name], -1).reshape(-1, array.shape[axes[name]])
        sums[name] = sums.get(name, 0.0) + rows.sum(axis=0, dtype=np.float64)
        counts[name] += len(rows)
    return {name: total / counts[name] for name, total in sums.items()}


def _answers(artifact: Artifact, data: Dataset, options: BiasCorrectionOptions) -> Outputs:
    return answers_of(artifact, data, options.threads, batch_size=options.batch_size, as_written=True)
