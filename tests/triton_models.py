"""The model repository that Triton's public client examples ask for, made anew: the eight models of its ``model_repository`` by name
and behaviour, and a second one with the custom models. ``python tests/triton_models.py FOLDER`` writes both below FOLDER.

The sequence models answer as the examples expect: ``simple_sequence`` gives its input and one more at the start of a sequence, the
``dyna`` ones add the correlation id at its end, and the one for string ids sums up.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from models import Value, artifact

INT8, INT32, INT64, UINT64 = TensorProto.INT8, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT64
STRING = TensorProto.STRING

Node = tuple[str, Sequence[str], Sequence[str]]


def write_examples(root: Path) -> Path:
    """The repository of eight models; ``root`` itself."""
    _write(root, "simple", _tensors("TYPE_INT32", 16), _sum_and_difference(INT32))
    _write(root, "simple_int8", _tensors("TYPE_INT8", 16), _sum_and_difference(INT8))
    _write(root, "simple_string", _tensors("TYPE_STRING", 16), _text_sum_and_difference())
    _write(root, "simple_identity", _one("TYPE_STRING", "INPUT0", "OUTPUT0", "-1"), _identity(STRING))
    _write(root, "simple_sequence", _SEQUENCE, _sequence(corrid=0))
    _write(root, "simple_dyna_sequence", _DYNA.replace("CORRID_TYPE", "TYPE_UINT64"), _sequence(corrid=UINT64))
    _write(root, "simple_string_dyna_sequence", _STRING_DYNA, _summing_sequence())
    _write(root, "densenet_onnx", _DENSENET, _classifier())
    (root / "densenet_onnx" / "densenet_labels.txt").write_text("".join(f"CLASS {n}\n" for n in range(1000)))
    return root


def write_custom(root: Path) -> Path:
    """The repository of custom models; ``root`` itself."""
    _write(root, "custom_identity_int32", _one("TYPE_INT32", "INPUT0", "OUTPUT0", "-1"), _identity(INT32))
    folder = root / "repeat_int32"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_REPEAT)
    (folder / "1" / "model.py").write_text(_REPEAT_MODEL)
    return root


def _write(root: Path, name: str, config: str, model: onnx.ModelProto) -> None:
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'name: "{name}"\nplatform: "onnxruntime_onnx"\n{config}')
    (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())


def _model(nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value]) -> onnx.ModelProto:
    """``Cast`` nodes are written as ``Cast:TYPE``."""
    plain = [(operator.partition(":")[0], into, out) for operator, into, out in nodes]
    model = onnx.load_model_from_string(artifact(plain, inputs, outputs).data)
    for node, (operator, _, _) in zip(model.graph.node, nodes, strict=True):
        if kind := operator.partition(":")[2]:
            node.attribute.append(onnx.helper.make_attribute("to", int(kind)))
    return model


def _sum_and_difference(kind: int) -> onnx.ModelProto:
    # ONNX adds no 8-bit integers.
    nodes: list[Node] = [(f"Cast:{INT32}", [f"INPUT{n}"], [f"wide{n}"]) for n in (0, 1)]
    nodes += [("Add", ["wide0", "wide1"], ["sum"]), ("Sub", ["wide0", "wide1"], ["difference"])]
    nodes += [(f"Cast:{kind}", ["sum"], ["OUTPUT0"]), (f"Cast:{kind}", ["difference"], ["OUTPUT1"])]
    return _model(nodes, *_pairs(kind))


def _text_sum_and_difference() -> onnx.ModelProto:
    nodes: list[Node] = [(f"Cast:{INT64}", [f"INPUT{n}"], [f"number{n}"]) for n in (0, 1)]
    nodes += [("Add", ["number0", "number1"], ["sum"]), ("Sub", ["number0", "number1"], ["difference"])]
    nodes += [(f"Cast:{STRING}", ["sum"], ["OUTPUT0"]), (f"Cast:{STRING}", ["difference"], ["OUTPUT1"])]
    return _model(nodes, *_pairs(STRING))


def _pairs(kind: int) -> tuple[list[Value], list[Value]]:
    shape = kind, ["N", 16]
    return [("INPUT0", *shape), ("INPUT1", *shape)], [("OUTPUT0", *shape), ("OUTPUT1", *shape)]


def _identity(kind: int) -> onnx.ModelProto:
    shape = kind, ["N", "length"]
    return _model([("Identity", ["INPUT0"], ["OUTPUT0"])], [("INPUT0", *shape)], [("OUTPUT0", *shape)])


def _sequence(corrid: int) -> onnx.ModelProto:
    """INPUT + START, and + END · CORRID if ``corrid`` is its type."""
    row = ["N", 1]
    inputs: list[Value] = [("INPUT", INT32, row), ("START", INT32, row), ("READY", INT32, row)]
    nodes: list[Node] = [("Add", ["INPUT", "START"], ["started"]), ("Mul", ["READY", "started"], ["ready"])]
    if corrid:
        inputs += [("END", INT32, row), ("CORRID", corrid, row)]
        nodes += [(f"Cast:{INT32}", ["CORRID"], ["id"]), ("Mul", ["END", "id"], ["last"])]
        nodes += [("Add", ["ready", "last"], ["OUTPUT"])]
    else:
        nodes += [("Identity", ["ready"], ["OUTPUT"])]
    return _model(nodes, inputs, [("OUTPUT", INT32, row)])


def _summing_sequence() -> onnx.ModelProto:
    """SUM_OUT = INPUT + (1 - START) · SUM_IN; OUTPUT = SUM_OUT + END · number in CORRID."""
    row = ["N", 1]
    inputs: list[Value] = [(name, INT32, row) for name in ("INPUT", "START", "END", "READY", "SUM_IN")]
    nodes: list[Node] = [
        ("Mul", ["START", "SUM_IN"], ["forgotten"]),
        ("Sub", ["SUM_IN", "forgotten"], ["kept"]),
        ("Add", ["INPUT", "kept"], ["SUM_OUT"]),
        (f"Cast:{INT64}", ["CORRID"], ["wide"]),
        (f"Cast:{INT32}", ["wide"], ["id"]),
        ("Mul", ["END", "id"], ["last"]),
        ("Add", ["SUM_OUT", "last"], ["sum"]),
        ("Mul", ["READY", "sum"], ["OUTPUT"]),
    ]
    outputs: list[Value] = [("OUTPUT", INT32, row), ("SUM_OUT", INT32, row)]
    return _model(nodes, [*inputs, ("CORRID", STRING, row)], outputs)


def _classifier() -> onnx.ModelProto:
    """Scores of 1000 classes from the means of an image's channels: the image client wants the shapes of the public model."""
    weights = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    made = artifact(
        [
            ("GlobalAveragePool", ["data_0"], ["means"]),
            ("Flatten", ["means"], ["flat"]),
            ("MatMul", ["flat", "weights"], ["scores"]),
            ("Reshape", ["scores", "shape"], ["fc6_1"]),
        ],
        [("data_0", TensorProto.FLOAT, [1, 3, 224, 224])],
        [("fc6_1", TensorProto.FLOAT, [1, 1000, 1, 1])],
        {"weights": weights, "shape": np.array([1, 1000, 1, 1])},
    )
    return onnx.load_model_from_string(made.data)


def _one(kind: str, input: str, output: str, dims: str) -> str:
    return f"""max_batch_size: 8
input [ {{ name: "{input}" data_type: {kind} dims: [ {dims} ] }} ]
output [ {{ name: "{output}" data_type: {kind} dims: [ {dims} ] }} ]
"""


def _tensors(kind: str, width: int) -> str:
    inputs, outputs = (
        ", ".join(f'{{ name: "{name}{n}" data_type: {kind} dims: [ {width} ] }}' for n in (0, 1))
        for name in ("INPUT", "OUTPUT")
    )
    return f"max_batch_size: 8\ninput [ {inputs} ]\noutput [ {outputs} ]\n"


def _flag(name: str, kind: str) -> str:
    return f'{{ name: "{name}" control [ {{ kind: {kind} int32_false_true: [ 0, 1 ] }} ] }}'


_ENDS = ", ".join([_flag("START", "CONTROL_SEQUENCE_START"), _flag("READY", "CONTROL_SEQUENCE_READY")])
_ALL = ", ".join([_ENDS, _flag("END", "CONTROL_SEQUENCE_END")])
_CORRID = '{ name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: CORRID_TYPE } ] }'
_NUMBERS = _one("TYPE_INT32", "INPUT", "OUTPUT", "1")

_SEQUENCE = f"""{_NUMBERS}sequence_batching {{
  max_sequence_idle_microseconds: 5000000
  control_input [ {_ENDS} ]
}}
"""
_DYNA = f"""{_NUMBERS}sequence_batching {{
  max_sequence_idle_microseconds: 5000000
  oldest {{ max_candidate_sequences: 1024 }}
  control_input [ {_ALL}, {_CORRID} ]
}}
"""
_STRING_DYNA = f"""{_NUMBERS}sequence_batching {{
  max_sequence_idle_microseconds: 5000000
  oldest {{ max_candidate_sequences: 1024 }}
  control_input [ {_ALL}, {_CORRID.replace("CORRID_TYPE", "TYPE_STRING")} ]
  state [ {{ input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
}}
"""
_DENSENET = """max_batch_size: 0
input [ { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ] reshape { shape: [ 1, 3, 224, 224 ] } } ]
output [
  { name: "fc6_1" data_type: TYPE_FP32 dims: [ 1000 ] reshape { shape: [ 1, 1000, 1, 1 ] } label_filename: "densenet_labels.txt" }
]
"""
_REPEAT = """name: "repeat_int32"
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [
  { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] }
]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
_REPEAT_MODEL = '''"""Answers once for every element of IN, after as many milliseconds as DELAY says, and returns after WAIT."""

import threading
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.threads = []

    def execute(self, requests):
        for request in requests:
            values, delays, waits = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY", "WAIT")
            )
            thread = threading.Thread(target=self.answer, args=(request.get_response_sender(), values, delays))
            self.threads.append(thread)
            thread.start()
            time.sleep(waits[0] / 1e3)
        return None

    def answer(self, sender, values, delays):
        for value, delay in zip(values, delays):
            time.sleep(delay / 1e3)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value.reshape(1))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        for thread in self.threads:
            thread.join()
'''


if __name__ == "__main__":
    write_examples(Path(sys.argv[1]) / "examples")
    write_custom(Path(sys.argv[1]) / "custom")
