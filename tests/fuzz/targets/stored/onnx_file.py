"""Fuzzes the reading of ONNX files without the package ``onnx``, and the proof that rows are independent, against that package."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import onnx
from google.protobuf.message import DecodeError

from penstock.artifact import Artifact, Format
from penstock.engines.integer_division import guarded
from penstock.protocol import onnx_scan
from penstock.protocol.varint import write_varint
from penstock.rows.graph import read_graph
from penstock.rows.proof import unproven
from penstock.tensor import DataType, Signature, TensorSpec
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import fields, relength
from tests.fuzz.target import DecoderTarget
from tests.row_graphs import parsed

_SIGNATURE = Signature((TensorSpec("x", DataType.FP32, (-1, 4)),), (TensorSpec("y", DataType.FP32, (-1, 4)),))
_BODIES = (
    "y = Relu(x)",
    "i = Cast<to = 7>(x) j = Div(i, i) k = Mod(j, i) y = Cast<to = 1>(k)",
    "a = Mul(x, x) b = ReduceSum<keepdims = 1>(a, axes) y = Add(x, b)",
    "s = Shape(x) f = Reshape(x, s) y = Transpose<perm = [0, 1]>(f)",
    "c = Constant<value = float[1] {1.0}>() d = Add(x, c) p, q = Split<axis = 1>(d) y = Concat<axis = 1>(p, q)",
    'y = local.f(x) FUNCTIONS <opset_import: ["": 17], domain: "local"> f (u) => (v) { v = Abs(u) }',
)
_WEIGHTS = "int64[1] axes = {1}"


def _seeds() -> list[Seed]:
    """The fields of graphs."""
    models = [onnx.ModelProto.FromString(parsed(body, weights=_WEIGHTS).data) for body in _BODIES]
    return [fields(model.graph.SerializeToString()) for model in models]


def _frame() -> tuple[bytes, bytes]:
    """What a model has before and after its graph: opsets, and functions."""
    model = onnx.ModelProto.FromString(parsed(_BODIES[-1]).data)
    functions = onnx.ModelProto(functions=model.functions).SerializeToString()
    model.ClearField("graph")
    model.ClearField("functions")
    return model.SerializeToString(), functions


class OnnxFileTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"\x0a\x00",
        b"\x08\x01",
        b"\x0d" + bytes(4),
        b"\x0b",
        b"\x80" * 11,
        b"\x6a\x0d\x0a\x08location\x12\x01a",
        b"\x70\x01",
        b"\x2a\x02\x0a\x00",
        b"Loop",
        b"Reshape",
        b"x",
        b"local",
    )

    def __init__(self) -> None:
        self._before, self._after = _frame()
        super().__init__(_seeds())
        models = [self.join(seed, Random(0)) for seed in self.seeds]
        assert all(self._decode_model(model) for model in models)

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        graph = b"".join(relength(parts) if random.random() < 0.7 else parts)
        return b"".join((self._before, b"\x3a", write_varint(len(graph)), graph, self._after))

    def decode(self, data: bytes) -> object:
        try:
            return self._decode_model(data)
        except ValueError as error:
            return str(error)

    def _decode_model(self, data: bytes) -> object:
        reason = unproven(Artifact.from_bytes(data, Format.ONNX), _SIGNATURE)
        model = read_graph(data)
        facts = (
            onnx_scan.has_control_flow(data),
            sorted(onnx_scan.unranked_inputs(data)),
            onnx_scan.has_recurrence(data),
        )
        guarded(data, lambda _: {})
        files = onnx_scan.external_files(data)
        self._compare(data, len(model.graph.nodes), files)
        return reason, facts, sorted(files)

    def _compare(self, data: bytes, nodes: int, files: set[str]) -> None:
        try:
            model = onnx.ModelProto.FromString(data)
        except (DecodeError, UnicodeDecodeError):
            return
        assert len(model.graph.node) == nodes
        told = {
            entry.value
            for tensor in model.graph.initializer
            if tensor.data_location == onnx.TensorProto.EXTERNAL
            for entry in tensor.external_data
            if entry.key == "location"
        }
        assert told <= files, f"{told - files} are not among the external files"
