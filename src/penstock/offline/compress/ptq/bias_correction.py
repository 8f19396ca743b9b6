"""Bias correction: rounding weights and activations shifts the mean of a layer's results; a new bias restores the mean.

The method is that of M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, §4.2, in
the empirical form of appendix D: b -= E[Wq x̂ - W x] for each output channel. Layers are corrected in the graph's order, and x̂ is
computed with all previous layers corrected. Both models run over the data, and only means are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidData, Unsupported
from penstock.offline.compress.ptq.qdq_placement import LINEAR_OPS, FloatModel, float_model
from penstock.offline.compress.taps import Taps
from penstock.offline.deadline import IsLate, never_late
from penstock.offline.judge.accuracy import answers, answers_of
from penstock.offline.judge.metrics import Outputs, sample_errors
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import CONVOLUTIONS, form_of
from penstock.offline.optimize.model import load_model, to_artifact
from penstock.offline.optimize.names import FreshNames
from penstock.offline.optimize.passes.dead_code import DeadCode
from penstock.offline.sessions import Overridden, loaded, signature_of
from penstock.tensor import Array, Signature

_SAMPLES = 128
"""Maximum number of samples, evenly spaced. The means are computed from one half, for which about 50 samples suffice. The error of the
outputs is measured on the other half."""
_BATCH = 32
_INT32 = np.iinfo(np.int32)

Corrections = dict[str, Array]
"""For each layer, the correction to subtract from its bias, with one number per channel."""


def correct_biases(original: Artifact, quantised: Artifact, data: Dataset, is_late: IsLate = never_late) -> Artifact:
    """Correct the biases of ``quantised``, which ``quantize`` made from ``original``, so that they restore the layers' means.

    All layers are corrected if this lowers the mean relative error of the outputs on held-out samples. Otherwise the layers are
    corrected one by one, and a correction is kept only if it lowers the error. INT32 biases keep their scale. A Conv or Gemm without a
    bias is given a bias, which the integer kernel adds at no cost. For a MatMul, the correction changes the constant of the following
    Add. Once ``is_late``, the remaining layers stay as they are. Raises Unsupported if ``quantised`` has no quantised layer of
    ``original``; InvalidData if the data do not fit or have fewer than two samples.
    """
    rows = min(_SAMPLES, data.count)
    if rows < 2:
        raise InvalidData(f"bias correction needs at least 2 samples, got {rows}", "give at least 2 samples")
    known = float_model(original)
    layers, plain = _layers(quantised, known), known.artifact()
    signature = signature_of(original)
    smallest = signature.smallest_batch
    fit, held_out = data.few(_SAMPLES, smallest).split_evenly(2, smallest)
    wanted = _means(Taps(plain, fit, signature=signature), {one.wanted: one.axis for one in layers})
    reference = answers_of(original, held_out, batch_size=_BATCH, as_written=True)
    probe = _Probe(quantised, layers, fit, held_out, reference, signature)
    first = probe.error({})
    for one_by_one in (False, True):
        corrections, left = _correct(probe, layers, wanted, one_by_one, is_late)
        best = probe.error(corrections)
        if best < first:
            break
    facts = {
        "error": [first, best],
        "layer_by_layer": one_by_one,
        "corrected": [layer.name for layer in layers if layer.name not in left],
        "left": left,
    }
    asked = {"data": data.digest, "original": original.digest}
    return quantised.derive(_corrected(quantised, corrections), "correct-biases", asked, facts)


class _Layer(NamedTuple):
    """A layer of both models."""

    name: str
    """The node's name in both models."""
    wanted: str
    """The layer's result in the float model."""
    found: str
    """The layer's result in the quantised model before rounding."""
    axis: int
    """The axis of the channels in both results."""


def _layers(quantised: Artifact, original: FloatModel) -> list[_Layer]:
    known = {node.name: node for node in original.nodes if node.op_type in LINEAR_OPS}
    found = [
        _Layer(
            f"{node.name}",
            known[node.name].output[0],
            f"{node.outputs[0].name}",
            1 if node.op_type in CONVOLUTIONS else -1,
        )
        for node in load_model(quantised).graph
        if node.name in known and node.op_type == known[node.name].op_type and _integer_weights(node) is not None
    ]
    if not found:
        raise Unsupported(
            "the quantised model has no quantised layer of the original",
            "give a model made by quantize(), and the float model that was quantised",
        )
    return found


class _Probe:
    """The quantised model with its layers' biases as optional inputs, so that corrections can be tried without loading it again."""

    def __init__(
        self,
        quantised: Artifact,
        layers: Sequence[_Layer],
        fit: Dataset,
        held_out: Dataset,
        reference: Outputs,
        signature: Signature,
    ) -> None:
        self._held_out, self._reference, self._signature = held_out, reference, signature
        model = load_model(quantised)
        nodes = {f"{node.name}": node for node in model.graph}
        self.biases: dict[str, _Bias] = {}
        self.refusals: dict[str, str] = {}
        """The reasons why biases cannot be corrected, by layer."""
        for layer in layers:
            try:
                self.biases[layer.name] = _own_bias(nodes[layer.name])
            except Unsupported as refusal:
                self.refusals[layer.name] = refusal.message
        model.graph.inputs.extend(bias.value for bias in self.biases.values())
        self._taps = Taps(to_artifact(model), fit, signature=signature)
        self._groups = self._taps.groups([*(layer.found for layer in layers), *signature.output_names])
        outputs = set(signature.output_names)
        self._whole = next((group for group in self._groups if outputs <= set(group)), signature.output_names)

    def mean(self, layer: _Layer, corrections: Corrections) -> Array:
        """The mean of each channel of ``layer`` with ``corrections``."""
        group = next(group for group in self._groups if layer.found in group)
        return _means(self._taps, {layer.found: layer.axis}, group, self._values(corrections))[layer.found]

    def error(self, corrections: Corrections) -> float:
        """The mean relative error of the outputs on the held-out samples, with ``corrections``."""
        with loaded(self._taps.showing(self._whole), as_written=True) as model:
            corrected = Overridden(model, self._values(corrections), self._signature)
            outputs = answers(corrected, self._held_out, _BATCH)
        return float(sample_errors(self._reference, outputs).mean())

    def _values(self, corrections: Corrections) -> dict[str, Array]:
        return {f"{self.biases[name].value.name}": self.biases[name].lowered(by) for name, by in corrections.items()}


def _correct(
    probe: _Probe, layers: Sequence[_Layer], wanted: Mapping[str, Array], one_by_one: bool, is_late: IsLate
) -> tuple[Corrections, dict[str, str]]:
    """The corrections by layer, and the reason for each layer without one. With ``one_by_one``, each correction must
    lower the error.
    """
    best = probe.error({}) if one_by_one else 0.0
    corrections: Corrections = {}
    left: dict[str, str] = {}
    for layer in layers:
        try:
            if is_late():
                raise Unsupported("there was no time")
            if layer.name in probe.refusals:
                raise Unsupported(probe.refusals[layer.name])
            by = probe.mean(layer, corrections) - wanted[layer.wanted]
            probe.biases[layer.name].lowered(by)
            tried = {**corrections, layer.name: by}
            if one_by_one:
                after = probe.error(tried)
                if after >= best:
                    raise Unsupported("the correction does not lower the outputs' error")
                best = after
            corrections = tried
        except Unsupported as refusal:
            left[layer.name] = refusal.message
    return corrections, left


def _corrected(quantised: Artifact, corrections: Corrections) -> Artifact:
    model = load_model(quantised)
    nodes = {f"{node.name}": node for node in model.graph}
    for name, by in corrections.items():
        bias = _own_bias(nodes[name])
        bias.value.const_value = ir.Tensor(bias.lowered(by), name=bias.value.name)
    DeadCode().call(model)
    return to_artifact(model)


class _Bias(NamedTuple):
    """A layer's bias: a constant that only this layer uses."""

    value: ir.Value
    start: Array
    scale: Array | None
    """The scale of an INT32 bias; None for FP32."""

    def lowered(self, by: Array) -> Array:
        """The bias minus ``by``, which has one number per channel. Raises Unsupported if the result does not fit the bias's type."""
        if self.scale is None:
            return np.asarray(self.start - by.reshape(self.start.shape), np.float32)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = self.start - np.round(by / self.scale.astype(np.float64))
        if not np.isfinite(found).all() or np.abs(found).max() > _INT32.max:
            raise Unsupported("the corrected bias does not fit INT32 at its scale")
        return found.astype(np.int32)


def _own_bias(node: ir.Node) -> _Bias:
    """Give ``node`` a bias that no other node uses. Raises Unsupported if the bias cannot be corrected."""
    if node.op_type == "MatMul":
        reader = graph.sole_consumer(node.outputs[0])
        if reader is None or reader.op_type != "Add":
            raise Unsupported("the only consumer of the MatMul's output must be one Add")
        return _own_float(reader, int(reader.inputs[0] is node.outputs[0]), node)
    form = form_of(node)
    if form is None or form.alpha != 1 or form.beta != 1:
        raise Unsupported("the Gemm scales its product or its bias")
    bias = graph.input_of(node, 2)
    source = None if bias is None else bias.producer()
    if bias is None:
        # In integer kernels, the scale of a bias must be the input's scale times the weight's scale.
        scales = [_constant_input(value.producer(), 1) for value in node.inputs[:2] if value is not None]
        if len(scales) < 2 or scales[0] is None or scales[1] is None:
            raise Unsupported("the scales are not constant")
        scale = np.asarray(scales[0] * scales[1], np.float32)
        return _own_integers(node, np.zeros(_channels(node), np.int32), scale)
    if source is None:
        return _own_float(node, 2, node)
    integers, known_scale = _constant_input(source, 0), _constant_input(source, 1)
    if source.op_type != "DequantizeLinear" or integers is None or known_scale is None or integers.dtype != np.int32:
        raise Unsupported("the bias is not constant")
    return _own_integers(node, integers, known_scale)


def _integer_weights(node: ir.Node) -> Array | None:
    """The integers of a layer's weights; None if they are not dequantised constants."""
    weight = graph.input_of(node, 1)
    source = None if weight is None else weight.producer()
    return _constant_input(source, 0) if source is not None and source.op_type == "DequantizeLinear" else None


def _channels(node: ir.Node) -> int:
    """The output channels of a layer with integer weights."""
    integers, form = _integer_weights(node), form_of(node)
    assert integers is not None
    assert form is not None
    return int(integers.shape[-1 if node.op_type == "MatMul" else form.outputs])


def _constant_input(node: ir.Node | None, index: int) -> Array | None:
    return None if node is None else graph.constant(graph.input_of(node, index))


def _own_float(node: ir.Node, index: int, layer: ir.Node) -> _Bias:
    value, bias, owner = node.inputs[index], _constant_input(node, index), node.graph
    assert isinstance(owner, ir.Graph)
    channels = _channels(layer)
    is_bias = bias is not None and bias.dtype == np.float32 and (bias.size, *bias.shape[-1:]) == (channels, channels)
    if value is None or bias is None or not is_bias:
        raise Unsupported("the Add has no FP32 constant with one number per channel")
    own = graph.add_constant(owner, bias, f"{value.name}")
    node.replace_input_with(index, own)
    return _Bias(own, bias, None)


def _own_integers(node: ir.Node, integers: Array, scale: Array) -> _Bias:
    owner = node.graph
    assert isinstance(owner, ir.Graph)
    constants = [graph.add_constant(owner, array, f"{node.name}_bias") for array in (integers, scale)]
    name = FreshNames(owner)(f"{constants[0].name}_dequantized")
    dequantise = ir.Node("", "DequantizeLinear", constants, [ir.AttrInt64("axis", 0)], num_outputs=1, name=name)
    dequantise.outputs[0].name = name
    owner.insert_before(node, dequantise)
    node.resize_inputs(3)
    node.replace_input_with(2, dequantise.outputs[0])
    return _Bias(constants[0], integers, scale)


def _means(
    taps: Taps, axes: Mapping[str, int], group: Sequence[str] = (), values: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """The FP64 mean of every channel of some tensors. ``axes`` maps the name of each tensor to its channel axis.

    ``group`` and ``values`` are the arguments of ``Taps.run``.
    """
    sums: dict[str, Array] = {}
    counts = dict.fromkeys(axes, 0)
    for name, array in taps.run(list(axes), group=group, values=values):
        rows = np.moveaxis(array, axes[name], -1).reshape(-1, array.shape[axes[name]])
        sums[name] = sums.get(name, 0.0) + rows.sum(axis=0, dtype=np.float64)
        counts[name] += len(rows)
    return {name: total / counts[name] for name, total in sums.items()}
