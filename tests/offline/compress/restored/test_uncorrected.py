import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from networks import attention, cnn, images
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.offline.compress.ptq.bias_correction import correct_biases
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.restored.uncorrected import uncorrected
from penstock.offline.sessions import loaded
from penstock.tensor import DataType

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
MODELS = {
    "cnn": (cnn(8), make_dataset({"x": images(32)}, None)),
    "attention": (
        attention(16),
        make_dataset({"x": np.random.default_rng(0).standard_normal((32, 5, 16)).astype(np.float32)}, None),
    ),
}


def run(model: Artifact, inputs: dict[str, np.ndarray]) -> np.ndarray:
    with loaded(model, as_written=True) as running:
        return running.forward(inputs)["y"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("placement", QdqPlacement)
def test_only_the_biases_are_put_back(name, placement):
    original, data = MODELS[name]
    source = quantize(original, ranges(collect(original, data), RangeMethod.MIN_MAX, SCHEME), SCHEME, placement)
    made = correct_biases(original, source, data)
    found = uncorrected(onnx.load_model_from_string(made.data), source)
    inputs = dict(data.inputs)
    want = run(source, inputs)
    # Layers that were not corrected still have the biases of the source.
    same = uncorrected(onnx.load_model_from_string(source.data), source)
    for one in (found, same):
        assert (run(Artifact.from_bytes(one.SerializeToString()), inputs) == want).all()

    wrong = onnx.load_model_from_string(made.data)
    tensor = next(
        one for one in wrong.graph.initializer if one.data_type == onnx.TensorProto.INT8 and len(one.dims) > 1
    )
    array = numpy_helper.to_array(tensor).copy()
    array.reshape(-1)[0] += 64 if array.reshape(-1)[0] < 0 else -64
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    found = uncorrected(wrong, source)
    assert (run(Artifact.from_bytes(found.SerializeToString()), inputs) != want).any()


def model(body: str, **weights: np.ndarray) -> onnx.ModelProto:
    graph = f"agraph (float[N, 2] x) => (float[N, 2] y) {{ {body} }}"
    made = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{graph}')
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return made


EYE, ONES = np.eye(2, dtype=np.float32), np.ones(2, np.float32)
ROWS = np.float32([[1, 2], [3, 4]])


@pytest.mark.parametrize("inputs", ["a, b", "b, a"])
def test_a_constant_bias_of_either_input_is_put_back(inputs):
    body = f"a = MatMul(x, w)\n y = Add({inputs})"
    source = Artifact.from_bytes(model(body, w=EYE, b=ONES).SerializeToString())
    found = uncorrected(model(body, w=EYE, b=5 * ONES), source)
    assert (run(Artifact.from_bytes(found.SerializeToString()), {"x": ROWS}) == ROWS + 1).all()


def test_a_bias_that_the_model_did_not_have_is_removed():
    source = Artifact.from_bytes(model("y = Gemm(x, w)", w=EYE).SerializeToString())
    found = uncorrected(model("y = Gemm(x, w, b)", w=EYE, b=ONES), source)
    assert list(found.graph.node[-1].input) == ["x", "w"]
    assert (run(Artifact.from_bytes(found.SerializeToString()), {"x": ROWS}) == ROWS).all()


def test_another_operator_remains_a_difference():
    source = Artifact.from_bytes(model("y = Sub(x, b)", b=ONES).SerializeToString())
    found = uncorrected(model("y = Add(x, b)", b=5 * ONES), source)
    assert (run(Artifact.from_bytes(found.SerializeToString()), {"x": ROWS}) == ROWS + 5).all()


def test_names_of_copies_are_unused():
    """A tensor of the model may have the name that the copy of a bias would get."""
    original, data = MODELS["cnn"]
    source = quantize(original, ranges(collect(original, data), RangeMethod.MIN_MAX, SCHEME), SCHEME)
    plain = uncorrected(onnx.load_model_from_string(source.data), source)
    taken = {name for node in plain.graph.node for name in (*node.input, *node.output) if "before_correction" in name}
    assert taken
    made = onnx.load_model_from_string(source.data)
    made.graph.initializer.extend(numpy_helper.from_array(np.ones(1, np.float32), name) for name in sorted(taken))
    found = uncorrected(made, source)
    names = [one.name for one in found.graph.initializer] + [name for node in found.graph.node for name in node.output]
    assert len(set(names)) == len(names)
