"""A repository of models that between them use every field of Triton's model configuration that the server acts on.

``write_repository(folder)`` writes it; ``CASES`` say what each model is to be asked and what it shall answer.
``python tests/model_repository.py FOLDER`` writes it too, for looking at it by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import bundles
import models
import tflite_models
import triton_models
from penstock.artifact import Artifact
from penstock.tensor import Array, DataType

FP32, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64

Tensors = Mapping[str, Array]

X = np.arange(6, dtype=np.float32).reshape(2, 3)
ROW = np.array([[1.0, -2.0, 0.5]], np.float32)
Y = X @ models.linear_weight()


@dataclass(frozen=True)
class Case:
    """One model. ``asked`` is None for one that is not asked (or not in one request that gets one answer)."""

    name: str
    files: Mapping[str, bytes | str]
    """By path below the model's folder; one that ends with a slash is an empty folder."""
    config: str | None = None
    """None: no ``config.pbtxt``."""
    asked: Tensors | None = field(default_factory=lambda: {"x": X})
    answered: Tensors = field(default_factory=lambda: {"y": Y})
    version: str = ""
    """The one asked for."""
    parameters: Mapping[str, object] = field(default_factory=dict)


def write_repository(folder: Path) -> Path:
    """``folder``, with a folder for each of ``CASES``."""
    for case in CASES:
        files = dict(case.files)
        if case.config is not None:
            files["config.pbtxt"] = case.config
        for path, content in files.items():
            target = folder / case.name / path
            if path.endswith("/"):
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def _onnx(artifact: Artifact, version: str = "1") -> dict[str, bytes | str]:
    return {f"{version}/model.onnx": artifact.data}


LINEAR = _onnx(models.linear())
LINEAR_IO = """input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def _scaled(factor: float) -> Artifact:
    """``y = factor · x``, x (N, 3)."""
    shape = ["N", 3]
    return models.artifact(
        [("Mul", ["x", "factor"], ["y"])], [("x", FP32, shape)], [("y", FP32, shape)], {"factor": np.float32([factor])}
    )


def _with_default() -> Artifact:
    """``y = x + bias`` where ``bias`` (1, 3) may be left out and is 10 then."""
    model = onnx.load_model_from_string(
        models.artifact(
            [("Add", ["x", "bias"], ["y"])],
            [("x", FP32, ["N", 3]), ("bias", FP32, [1, 3])],
            [("y", FP32, ["N", 3])],
            {"bias": np.full((1, 3), 10, np.float32)},
        ).data
    )
    return Artifact.from_bytes(model.SerializeToString())


def _vector_sums() -> Artifact:
    """``y`` (N, 1): the sums of N parts of ``x`` (L,); ``ends`` (N,) FP32 tells where each part ends."""
    nodes = [
        helper.make_node("CumSum", ["x", "axis"], ["sums"]),
        helper.make_node("Cast", ["ends"], ["places"], to=INT64),
        helper.make_node("Sub", ["places", "one"], ["last"]),
        helper.make_node("Gather", ["sums", "last"], ["upto"]),
        helper.make_node("Concat", ["zero", "upto"], ["padded"], axis=0),
        helper.make_node("Slice", ["padded", "first", "before_last"], ["previous"]),
        helper.make_node("Sub", ["upto", "previous"], ["parts"]),
        helper.make_node("Unsqueeze", ["parts", "one"], ["y"]),
    ]
    weights = {
        "axis": np.array(0),
        "one": np.array([1]),
        "zero": np.zeros(1, np.float32),
        "first": np.array([0]),
        "before_last": np.array([-1]),
    }
    graph = helper.make_graph(
        nodes,
        "sums",
        [helper.make_tensor_value_info("x", FP32, ["L"]), helper.make_tensor_value_info("ends", FP32, ["N"])],
        [helper.make_tensor_value_info("y", FP32, ["N", 1])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Artifact.from_bytes(model.SerializeToString())


def _scalar() -> Artifact:
    """``y = 2 x`` of shape (N,)."""
    return models.artifact([("Add", ["x", "x"], ["y"])], [("x", FP32, ["N"])], [("y", FP32, ["N"])])


def _torchscript() -> bytes:
    import io  # noqa: PLC0415

    import torch  # noqa: PLC0415

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    stream = io.BytesIO()
    torch.jit.save(torch.jit.trace(Double(), torch.zeros(2, 3)), stream)
    return stream.getvalue()


def _exported() -> bytes:
    import io  # noqa: PLC0415

    import torch  # noqa: PLC0415

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    stream = io.BytesIO()
    batch = torch.export.Dim("batch", min=1, max=1024)
    torch.export.save(torch.export.export(Double(), (torch.zeros(2, 3),), dynamic_shapes=({0: batch},)), stream)
    return stream.getvalue()


def _openvino() -> dict[str, bytes | str]:
    import tempfile  # noqa: PLC0415

    import openvino  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = openvino.Core().read_model(models.linear().data)
        openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)
        return {f"1/{path.name}": path.read_bytes() for path in folder.iterdir()}


def _bundle() -> bytes:
    import tempfile  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        return bundles.packed(Path(folder) / "model.bundle", {"model.onnx": models.linear().data}).read_bytes()


PYTHON_IO = """input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""

PYTHON_DOUBLE = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.factor = 2

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * self.factor)]))
        return responses
"""

PYTHON_AUTO = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [3]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [3]})
        config.set_max_batch_size(4)
        return config
""" + PYTHON_DOUBLE.partition("class TritonPythonModel:")[2]

PYTHON_CALLS = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.ask(request) for request in requests]

    def ask(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x")
        inner = pb_utils.InferenceRequest(model_name="bare", requested_output_names=["y"], inputs=[x])
        answer = inner.exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        y = pb_utils.get_output_tensor_by_name(answer, "y").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])
"""

PYTHON_FUNCTION = """import penstock
from penstock import Tensor


@penstock.model
def total(x: Tensor["FP32", -1, 3]) -> Tensor["FP32", -1]:
    return x.sum(axis=1)
"""

PYTHON_CLASS = """import penstock
from penstock import Context, Tensor


@penstock.model
class Scale:
    def load(self, context: Context) -> None:
        self.scale = float(context.parameters["scale"])
        self.context = context

    def forward(self, x: Tensor["FP32", -1, 3]) -> Tensor["FP32", -1, 3]:
        with self.context.stage("scale"):
            return x * x.dtype.type(self.scale)
"""

PYTHON_REPEAT = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in pb_utils.get_input_tensor_by_name(request, "x").as_numpy():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", value.reshape(1))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

_SEQUENCE_IO = """input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
_FIRST = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
_FIVE = {"INPUT": np.array([[5]], np.int32)}


def _step(model: str, ins: str, outs: str, version: int = -1) -> str:
    (inner, outer), (made, called) = ins.split("="), outs.split("=")
    return f"""{{ model_name: "{model}" model_version: {version}
      input_map {{ key: "{inner}" value: "{outer}" }} output_map {{ key: "{made}" value: "{called}" }} }}"""


def _ensemble(*steps: str, more: str = "", dims: int = 2) -> str:
    return f"""platform: "ensemble"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 3 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
ensemble_scheduling {{ step [ {", ".join(steps)} ] {more} }}
"""


def _queue(more: str) -> str:
    return f"max_batch_size: 8\ndynamic_batching {{ {more} }}\n"


def _policy_versions() -> dict[str, bytes | str]:
    return {f"{version}/model.onnx": _scaled(float(version)).data for version in ("1", "2", "10")}


def _parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


_DOUBLED = {"y": X * 2}
_ON_ONNX: list[Case] = [
    Case("bare", LINEAR),
    Case("named", LINEAR, f'name: "named"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 4\n{LINEAR_IO}'),
    Case("by_backend", LINEAR, 'backend: "onnxruntime"\n'),
    Case("outputs_only", LINEAR, 'output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]\nmax_batch_size: 2\n'),
    Case(
        "unbatched",
        LINEAR,
        "max_batch_size: 0\n" + LINEAR_IO.replace("dims: [ 3 ]", "dims: [ -1, 3 ]").replace("[ 2 ]", "[ -1, 2 ]"),
    ),
    Case(
        "fixed",
        _onnx(models.fixed_batch()),
        asked={"x": ROW},
        answered={"y": -ROW},
    ),
    Case("comments", LINEAR, "# of all kinds\nmax_batch_size : 4 # here too\n  instance_group[{count:1}]\n"),
    Case("file_named", {"1/weights.onnx": models.linear().data}, 'default_model_filename: "weights.onnx"\n'),
    Case("latest", _policy_versions(), answered={"y": X * 10}),
    Case(
        "latest_two",
        _policy_versions(),
        "version_policy { latest { num_versions: 2 } }",
        version="2",
        answered=_DOUBLED,
    ),
    Case("all_versions", _policy_versions(), "version_policy { all {} }", version="1", answered={"y": X}),
    Case("specific", _policy_versions(), "version_policy { specific { versions: [ 1, 2 ] } }", answered=_DOUBLED),
    Case(
        "alternative",
        {**LINEAR, "configs/small.pbtxt": "max_batch_size: 2\n"},
        "max_batch_size: 8\n",
    ),
    Case("preferred", LINEAR, _queue("preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100")),
    Case(
        "priorities",
        LINEAR,
        _queue(
            """priority_levels: 3 default_priority_level: 2
            default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 9000000 max_queue_size: 64 }
            priority_queue_policy { key: 1 value { allow_timeout_override: true timeout_action: DELAY } }"""
        ),
        parameters={"priority": 1},
    ),
    Case("ordered", LINEAR, _queue("preserve_ordering: true")),
    Case("two_instances", LINEAR, "instance_group [ { count: 2 kind: KIND_CPU } ]\n"),
    Case("two_groups", LINEAR, 'instance_group [ { name: "a" count: 1 }, { name: "b" kind: KIND_AUTO } ]\n'),
    Case("isolated", LINEAR, _parameter("isolation", "process")),
    Case("labelled", {**LINEAR, "labels.txt": "cat\ndog\n"}, 'output [ { name: "y" label_filename: "labels.txt" } ]\n'),
    Case("tagged", LINEAR, 'metric_tags { key: "team" value: "vision" }\n'),
    Case("threaded", LINEAR, _parameter("intra_op_thread_count", "1") + _parameter("whatever", "is kept")),
    Case(
        "accelerated",
        LINEAR,
        'optimization { execution_accelerators { cpu_execution_accelerator [ { name: "openvino" } ] } }\n',
    ),
    Case("optimised", LINEAR, "optimization { graph { level: 1 } priority: PRIORITY_MAX eager_batching: true }\n"),
    Case(
        "warm",
        {**LINEAR, "warmup/three": ROW.tobytes()},
        """max_batch_size: 4
model_warmup [
  { name: "zeros" batch_size: 2 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 3 ] zero_data: true } } },
  { name: "noise" batch_size: 1 count: 2 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 3 ] random_data: true } } },
  { name: "file" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 3 ] input_data_file: "three" } } }
]
""",
    ),
    Case("cached", LINEAR, "response_cache { enable: true }\n"),
    Case(
        "limited", LINEAR, 'instance_group [ { rate_limiter { resources [ { name: "R" count: 1 } ] priority: 2 } } ]\n'
    ),
    Case(
        "reshaped",
        _onnx(_scalar()),
        """max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } } ]
""",
        asked={"x": np.float32([[3]])},
        answered={"y": np.float32([[6]])},
    ),
    Case(
        "optional",
        _onnx(_with_default()),
        """max_batch_size: 0
input [
  { name: "x" data_type: TYPE_FP32 dims: [ -1, 3 ] },
  { name: "bias" data_type: TYPE_FP32 dims: [ 1, 3 ] optional: true }
]
""",
        answered={"y": X + 10},
    ),
    Case(
        "ragged",
        _onnx(_vector_sums()),
        """max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
batch_input [ { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_FP32 source_input: "x" } ]
dynamic_batching { }
""",
        asked={"x": np.float32([[1, 2, 3, 4]])},
        answered={"y": np.float32([[10]])},
    ),
    Case(
        "half",
        _onnx(models.identity(DataType.FP16)),
        asked={"x": np.float16([[1.5, -2]])},
        answered={"y": np.float16([[1.5, -2]])},
    ),
    Case(
        "brain",
        _onnx(models.identity(DataType.BF16)),
        asked={"x": np.array([[1.5, -2]], ml_dtypes.bfloat16)},
        answered={"y": np.array([[1.5, -2]], ml_dtypes.bfloat16)},
    ),
    Case(
        "text",
        _onnx(models.identity(DataType.BYTES)),
        asked={"x": np.array([[b"a", "π".encode()]], np.object_)},
        answered={"y": np.array([[b"a", "π".encode()]], np.object_)},
    ),
    Case(
        "truth",
        _onnx(models.identity(DataType.BOOL)),
        asked={"x": np.array([[True, False]])},
        answered={"y": np.array([[True, False]])},
    ),
    Case(
        "image",
        _onnx(models.dynamic_image()),
        'input [ { name: "x" format: FORMAT_NCHW data_type: TYPE_FP32 dims: [ 2, -1, -1 ] } ]\nmax_batch_size: 4\n',
        asked={"x": np.ones((1, 2, 4, 5), np.float32)},
        answered={"y": np.ones((1, 2, 1, 1), np.float32)},
    ),
    Case(
        "labels_of_versions",
        _policy_versions(),
        "version_policy { all {} }\n" + _parameter("version_labels", "stable:1,next:10"),
        answered={"y": X * 10},
    ),
]

_SEQUENCES: list[Case] = [
    Case(
        "sequence_direct",
        {"1/model.onnx": triton_models._sequence(corrid=0).SerializeToString()},
        triton_models._SEQUENCE,
        asked=_FIVE,
        answered={"OUTPUT": np.array([[6]], np.int32)},
        parameters=_FIRST,
    ),
    Case(
        "sequence_oldest",
        {"1/model.onnx": triton_models._sequence(corrid=TensorProto.UINT64).SerializeToString()},
        triton_models._DYNA.replace("CORRID_TYPE", "TYPE_UINT64"),
        asked=_FIVE,
        answered={"OUTPUT": np.array([[13]], np.int32)},
        parameters=_FIRST,
    ),
    Case(
        "sequence_state",
        {"1/model.onnx": triton_models._summing_sequence().SerializeToString()},
        triton_models._STRING_DYNA,
        asked=_FIVE,
        answered={"OUTPUT": np.array([[12]], np.int32)},
        parameters=_FIRST | {"sequence_id": "7"},
    ),
]

_ENSEMBLES: list[Case] = [
    Case(
        "chain",
        {"1/": ""},
        _ensemble(_step("latest", "x=x", "y=scaled"), _step("bare", "x=scaled", "y=y")),
        answered={"y": Y * 10},
    ),
    Case(
        "chosen_version",
        {"1/": ""},
        _ensemble(_step("all_versions", "x=x", "y=scaled", version=2), _step("bare", "x=scaled", "y=y")),
        answered={"y": Y * 2},
    ),
    Case(
        "nested",
        {"1/": ""},
        _ensemble(_step("latest", "x=x", "y=more"), _step("chain", "x=more", "y=y")),
        answered={"y": Y * 100},
    ),
    Case(
        "bounded",
        {"1/": ""},
        _ensemble(_step("latest", "x=x", "y=s"), _step("bare", "x=s", "y=y"), more="max_inflight_requests: 4"),
        answered={"y": Y * 10},
    ),
]

_ENSEMBLES.append(
    Case(
        "conditional",
        {"1/": ""},
        _ensemble(_step("latest", "x=x", "y=y"), _step("all_versions", "x=x", "y=y", version=2), dims=3).replace(
            "input [ ", 'input [ { name: "choose" data_type: TYPE_INT32 dims: [ 1 ] }, '
        )
        + _parameter("if.0", "choose == 1")
        + _parameter("if.1", "choose != 1"),
        asked={"x": X, "choose": np.array([[1], [1]], np.int32)},
        answered={"y": X * 10},
    )
)

_PYTHON: list[Case] = [
    Case(
        "python_double",
        {"1/model.py": PYTHON_DOUBLE},
        f'backend: "python"\nmax_batch_size: 4\n{PYTHON_IO}',
        answered=_DOUBLED,
    ),
    Case("python_auto", {"1/model.py": PYTHON_AUTO}, answered=_DOUBLED),
    Case("python_function", {"1/model.py": PYTHON_FUNCTION}, answered={"output": X.sum(axis=1)}),
    Case("python_class", {"1/model.py": PYTHON_CLASS}, _parameter("scale", "3"), answered={"output": X * 3}),
    Case(
        "python_calls",
        {"1/model.py": PYTHON_CALLS},
        'backend: "python"\nmax_batch_size: 4\n' + LINEAR_IO,
    ),
    Case(
        "python_repeat",
        {"1/model.py": PYTHON_REPEAT},
        """backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
""",
        asked=None,
    ),
]

_FORMATS: list[Callable[[], Case]] = [
    lambda: Case(
        "torchscript",
        {"1/model.pt": _torchscript()},
        'platform: "pytorch_libtorch"\nmax_batch_size: 4\n' + PYTHON_IO.replace('"y"', '"y__0"'),
        answered={"y__0": X * 2},
    ),
    lambda: Case("exported", {"1/model.pt2": _exported()}, 'backend: "pytorch"\n' + "max_batch_size: 4\n", asked=None),
    lambda: Case("intermediate", _openvino()),
    lambda: Case("lite", {"1/model.tflite": tflite_models.linear().data}, "max_batch_size: 8\n"),
    lambda: Case("bundled", {"1/model.bundle": _bundle()}),
]

CASES: list[Case] = [*_ON_ONNX, *_SEQUENCES, *_ENSEMBLES, *_PYTHON, *(make() for make in _FORMATS)]


if __name__ == "__main__":
    write_repository(Path(sys.argv[1]))
