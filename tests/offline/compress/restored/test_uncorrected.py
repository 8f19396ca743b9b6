import numpy as np
import onnx
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
