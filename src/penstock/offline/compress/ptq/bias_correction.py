"""Bias correction: rounding weights and activations shifts the mean of a layer's results; its bias takes that back.

M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, §4.2, in the empirical
form of its appendix D: b -= E[Wq x̂ - W x] for each output channel, layer by layer in the graph's order, x̂ coming from the layers
that are corrected already. Both models run over the data; only means are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidArgument, InvalidData, Unsupported
from penstock.offline.compress.ptq.qdq_placement import LINEAR_OPS, FloatModel, float_model
from penstock.offline.compress.taps import Progress, Taps, no_progress
from penstock.offline.judge.accuracy import answers, answers_of
from penstock.offline.judge.metrics import Outputs, sample_errors
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import form_of
from penstock.offline.optimize.model import load_model, to_bytes
from penstock.offline.optimize.passes.dead_code import DeadCode
from penstock.offline.sessions import Overridden, loaded, signature_of
from penstock.tensor import Array, Signature

_INT32 = np.iinfo(np.int32)
Corrections = dict[str, Array]
"""By layer, the correction to subtract from its bias, one number per channel."""


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
    known = float_model(original)
    layers, plain = _layers(quantised, known), known.artifact()
    signature = signature_of(original)
    fit, held_out = make_dataset(data.rows(0, rows - rows % signature.smallest_batch), None).split(
        options.held_out, signature.smallest_batch
    )
    wanted = _means(Taps(plain, fit, **_taps(options), signature=signature), {one.wanted: one.axis for one in layers})
    probe = _Probe(quantised, layers, fit, held_out, _answers(original, held_out, options), signature, options)
    first = probe.error({})
    for judged in (False, True):
        corrections, left = _correct(probe, layers, wanted, judged, progress)
        best = probe.error(corrections)
        if best < first:
            break
    asked = {**msgspec.structs.asdict(options), "data": data.digest, "original": original.digest}
    facts = {
        "error": [first, best],
        "layer_by_layer": judged,
        "corrected": [layer.name for layer in layers if layer.name not in left],
        "left": left,
    }
    return quantised.derive(_corrected(quantised, corrections), "correct-biases", asked, facts)


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


class _Probe:
    """The quantised model with the biases of its layers as optional inputs, so that any can be tried without loading it anew."""

    def __init__(
        self,
        quantised: Artifact,
        layers: Sequence[_Layer],
        fit: Dataset,
        held_out: Dataset,
        reference: Outputs,
        signature: Signature,
        options: BiasCorrectionOptions,
    ) -> None:
        self._held_out, self._reference, self._options = held_out, reference, options
        model = load_model(quantised)
        nodes = {f"{node.name}": node for node in model.graph}
        self.biases: dict[str, _Bias] = {}
        self.refusals: dict[str, str] = {}
        """The layers whose biases cannot be corrected, and why."""
        for layer in layers:
            try:
                self.biases[layer.name] = _own_bias(nodes[layer.name])
            except Unsupported as refusal:
                self.refusals[layer.name] = refusal.message
        model.graph.inputs.extend(bias.value for bias in self.biases.values())
        self._taps = Taps(Artifact.from_bytes(to_bytes(model)), fit, **_taps(options), signature=signature)
        self._groups = self._taps.groups([*(layer.found for layer in layers), *signature.output_names])
        outputs = set(signature.output_names)
        self._whole = next((group for group in self._groups if outputs <= set(group)), signature.output_names)
        self._signature = signature

    def mean(self, layer: _Layer, corrections: Corrections) -> Array:
        """The mean of each channel of ``layer`` with biases corrected so."""
        group = next(group for group in self._groups if layer.found in group)
        return _means(self._taps, {layer.found: layer.axis}, group, self._values(corrections))[layer.found]

    def error(self, corrections: Corrections) -> float:
        """The mean relative error of the outputs on the samples held out, with biases corrected so."""
        with loaded(self._taps.showing(self._whole), self._options.threads, as_written=True) as model:
            corrected = Overridden(model, self._values(corrections), self._signature)
            outputs = answers(corrected, self._held_out, self._options.batch_size)
        return float(sample_errors(self._reference, outputs).mean())

    def _values(self, corrections: Corrections) -> dict[str, Array]:
        return {f"{self.biases[name].value.name}": self.biases[name].lowered(by) for name, by in corrections.items()}


def _correct(
    probe: _Probe, layers: Sequence[_Layer], wanted: Mapping[str, Array], judged: bool, progress: Progress
) -> tuple[Corrections, dict[str, str]]:
    """The corrections, layer by layer, each kept only if the error falls where ``judged``; and the layers left, with the reason."""
    best = probe.error({}) if judged else 0.0
    corrections: Corrections = {}
    left: dict[str, str] = {}
    for number, layer in enumerate(layers, 1):
        try:
            if layer.name in probe.refusals:
                raise Unsupported(probe.refusals[layer.name])
            by = probe.mean(layer, corrections) - wanted[layer.wanted]
            probe.biases[layer.name].lowered(by)
            tried = {**corrections, layer.name: by}
            if judged:
                after = probe.error(tried)
                if after >= best:
                    raise Unsupported("the outputs' error does not fall")
                best = after
            corrections = tried
        except Unsupported as refusal:
            left[layer.name] = refusal.message
        progress(number, len(layers))
    return corrections, left


def _corrected(quantised: Artifact, corrections: Corrections) -> bytes:
    model = load_model(quantised)
    nodes = {f"{node.name}": node for node in model.graph}
    for name, by in corrections.items():
        bias = _own_bias(nodes[name])
        bias.value.const_value = ir.Tensor(bias.lowered(by), name=bias.value.name)
    DeadCode().call(model)
    return to_bytes(model)


class _Bias(NamedTuple):
    """A layer's bias, a constant that nothing else reads."""

    value: ir.Value
    start: Array
    scale: Array | None
    """Of INT32 biases; None for FP32."""

    def lowered(self, by: Array) -> Array:
        """The bias less ``by``, one number a channel. Raises Unsupported if it would not fit its type."""
        if self.scale is None:
            return np.asarray(self.start - by.reshape(self.start.shape), np.float32)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = self.start - np.round(by / self.scale.astype(np.float64))
        if not np.isfinite(found).all() or np.abs(found).max() > _INT32.max:
            raise Unsupported("the bias would not fit INT32 in its scale")
        return found.astype(np.int32)


def _own_bias(node: ir.Node) -> _Bias:
    """Give ``node`` a bias that nothing else reads. Raises Unsupported if its bias cannot be corrected."""
    if node.op_type == "MatMul":
        reader = graph.sole_consumer(node.outputs[0])
        if reader is None or reader.op_type != "Add":
            raise Unsupported("the output of the MatMul is not read by a single Add")
        return _own_float(reader, int(reader.inputs[0] is node.outputs[0]), node)
    form = form_of(node)
    if form is None or form.alpha != 1 or form.beta != 1:
        raise Unsupported("a Gemm that scales its product or its bias")
    bias = graph.input_of(node, 2)
    source = None if bias is None else bias.producer()
    if bias is None:
        # A new one, in the scale that integer kernels demand: input times weight.
        scales = [_read_by(value.producer(), 1) for value in node.inputs[:2] if value is not None]
        if len(scales) < 2 or scales[0] is None or scales[1] is None:
            raise Unsupported("its scales are not constant")
        scale = np.asarray(scales[0] * scales[1], np.float32)
        return _own_integers(node, np.zeros(_channels(node), np.int32), scale)
    if source is None:
        return _own_float(node, 2, node)
    integers, scale_or_none = _read_by(source, 0), _read_by(source, 1)
    if source.op_type != "DequantizeLinear" or integers is None or scale_or_none is None or integers.dtype != np.int32:
        raise Unsupported("a bias that is not constant")
    return _own_integers(node, integers, scale_or_none)


def _channels(node: ir.Node) -> int:
    """The output channels of a layer whose weights are dequantised."""
    weight = node.inputs[1]
    integers = None if weight is None else _read_by(weight.producer(), 0)
    assert integers is not None
    form = form_of(node)
    assert form is not None
    return int(integers.shape[form.outputs])


def _read_by(node: ir.Node | None, index: int) -> Array | None:
    return None if node is None else graph.constant(graph.input_of(node, index))


def _own_float(node: ir.Node, index: int, layer: ir.Node) -> _Bias:
    value, bias, owner = node.inputs[index], _read_by(node, index), node.graph
    assert isinstance(owner, ir.Graph)
    channels = _channels(layer)
    if (
        value is None
        or bias is None
        or bias.dtype != np.float32
        or (bias.size, *bias.shape[-1:]) != (channels, channels)
    ):
        raise Unsupported("nothing constant in FP32 is added to it")
    own = graph.add_constant(owner, bias, f"{value.name}")
    node.replace_input_with(index, own)
    return _Bias(own, bias, None)


def _own_integers(node: ir.Node, integers: Array, scale: Array) -> _Bias:
    owner = node.graph
    assert isinstance(owner, ir.Graph)
    constants = [graph.add_constant(owner, array, f"{node.name}_bias") for array in (integers, scale)]
    name = f"{constants[0].name}_dequantized"
    dequantise = ir.Node("", "DequantizeLinear", constants, [ir.AttrInt64("axis", 0)], num_outputs=1, name=name)
    dequantise.outputs[0].name = name
    owner.insert_before(node, dequantise)
    node.resize_inputs(3)
    node.replace_input_with(2, dequantise.outputs[0])
    return _Bias(constants[0], integers, scale)


def _means(
    taps: Taps, axes: Mapping[str, int], group: Sequence[str] = (), values: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """The mean of every channel of the tensors in ``axes``, which says where their channels are; FP64.

    ``group`` and ``values`` as in ``Taps.run``.
    """
    sums: dict[str, Array] = {}
    counts = dict.fromkeys(axes, 0)
    for name, array in taps.run(list(axes), group=group, values=values):
        rows = np.moveaxis(array, axes[name], -1).reshape(-1, array.shape[axes[name]])
        sums[name] = sums.get(name, 0.0) + rows.sum(axis=0, dtype=np.float64)
        counts[name] += len(rows)
    return {name: total / counts[name] for name, total in sums.items()}


def _taps(options: BiasCorrectionOptions) -> dict[str, int]:
    return {"batch_size": options.batch_size, "threads": options.threads}


def _answers(artifact: Artifact, data: Dataset, options: BiasCorrectionOptions) -> Outputs:
    return answers_of(artifact, data, options.threads, batch_size=options.batch_size, as_written=True)
