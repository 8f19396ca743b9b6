"""Compares ONNX models with the same models as sources, which compute with other rounding."""

from __future__ import annotations

import onnx

from benchmarks.onnx_source import OnnxSource
from penstock.artifact import Artifact
from penstock.clock import ManualClock
from penstock.offline.convert.base import ConvertOptions, Exported, TensorLink
from penstock.offline.convert.certificate import Certificate
from penstock.offline.convert.parity.parity import certify
from penstock.offline.convert.parity.patience import Patience

LAYER_NORM = """g (float[N,8] x) => (float[N,8] y) <int64[1] last = {-1}, float small = {0.000001}> {
    m = ReduceMean(x, last)
    d = Sub(x, m)
    q = Mul(d, d)
    v = ReduceMean(q, last)
    e = Add(v, small)
    s = Sqrt(e)
    y = Div(d, s) }"""
"""As exporters decompose it. The variance of a constant row is 0, so that rounding is multiplied by a thousand."""


def parsed(text: str) -> onnx.ModelProto:
    """The model of the graph ``text``, such as ``g (float[N] x) => (float[N] y) { y = Abs(x) }``."""
    model: onnx.ModelProto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> ' + text)
    return model


def artifact(model: onnx.ModelProto) -> Artifact:
    return Artifact.from_bytes(model.SerializeToString())


def checked(
    before: onnx.ModelProto, after: onnx.ModelProto, links: tuple[TensorLink, ...] | None = None, seed: int = 0
) -> Certificate:
    source = OnnxSource(artifact(before), before, seed)
    exported = source.exported if links is None else Exported("test", links)
    endless = Patience(clock=ManualClock())  # otherwise, a busy machine would leave out calls that find small errors
    return certify(artifact(after), source, exported, ConvertOptions(), seed, patience=endless)
