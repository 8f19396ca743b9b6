"""Sources of TensorFlow, with what the user declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("tf2onnx")
tf = pytest.importorskip("tensorflow")

from penstock.errors import InvalidArgument, InvalidModel  # noqa: E402
from penstock.offline.convert.base import ConvertOptions, InputSpec  # noqa: E402
from penstock.tensor import DataType  # noqa: E402
from tensorflow_conversions import CONVERTER, opened, run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_inputs_can_be_fixed_and_named(folder: Path, tmp_path: Path) -> None:
    inputs = (InputSpec("image", DataType.FP32, ("n", 12, 12, 3)),)
    model = opened("keras_cnn", folder, inputs=inputs)
    assert model.signature.inputs[0].shape == (-1, 12, 12, 3)
    assert [axis.name for axis in model.axes["image"]] == ["n"]
    model.export(tmp_path / "model.onnx", 18)
    (image,) = onnx.load(tmp_path / "model.onnx").graph.input
    assert [dim.dim_param or dim.dim_value for dim in image.type.tensor_type.shape.dim] == ["n", 12, 12, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": (InputSpec("picture", None, None),)}, "no input 'picture'"),
        ({"inputs": (InputSpec("image", DataType.INT64, None),)}, "type float32 in the model, not INT64"),
        ({"inputs": (InputSpec("image", None, (1, 8, 8, 4)),)}, r"shape \(None, None, None, 3\) in the model"),
        ({"inputs": (InputSpec("image", None, (1, 8)),)}, r"but \(1, 8\) was declared"),
        ({"dynamic": {"image": {3: "channels"}}}, "dimension 3 of the input 'image' cannot be free"),
        ({"dynamic": {"image": {9: "x"}}}, "dimension 9 of the input 'image' cannot be free"),
        ({"outputs": ("mask",)}, "no output 'mask'"),
    ],
)
def test_options_that_contradict_the_model_are_rejected(options: Any, message: str, folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        opened("keras_cnn", folder, **options)


def test_a_signature_can_be_chosen(tmp_path: Path) -> None:
    module = tf.Module()
    spec = tf.TensorSpec((None, 3), tf.float32, "x")
    module.double = tf.function(lambda x: {"twice": x + x}, input_signature=[spec])
    module.square = tf.function(lambda x: {"squared": x * x}, input_signature=[spec])
    tf.saved_model.save(module, str(tmp_path / "saved"), {"double": module.double, "square": module.square})
    for wanted, output in (("", "twice"), ("double", "twice"), ("square", "squared")):
        model = CONVERTER.open(tmp_path / "saved", ConvertOptions(signature=wanted))
        assert model.signature.output_names == [output]
    with pytest.raises(InvalidArgument, match="no signature 'cube'") as caught:
        CONVERTER.open(tmp_path / "saved", ConvertOptions(signature="cube"))
    assert caught.value.hint == "its signatures are double, square"


def test_a_graph_with_variables_is_not_frozen(tmp_path: Path) -> None:
    with tf.compat.v1.Graph().as_default() as graph:
        tf.compat.v1.get_variable("weight", [2], use_resource=True)
    (tmp_path / "model.pb").write_bytes(graph.as_graph_def().SerializeToString())
    with pytest.raises(InvalidModel, match="not frozen: it has 1 variables, such as 'weight'"):
        CONVERTER.open(tmp_path / "model.pb", ConvertOptions())


def test_the_outputs_of_a_graph_can_be_named(folder: Path, tmp_path: Path) -> None:
    model = opened("graph_cnn", folder, outputs=("Relu6",))
    model.export(tmp_path / "model.onnx", 21)
    assert model.signature.output_names == ["Relu6"]
    with pytest.raises(InvalidArgument, match="no tensor of this name"):
        opened("graph_cnn", folder, outputs=("nothing",))


def test_functions_of_the_user_are_converted(tmp_path: Path) -> None:
    inputs = (InputSpec("x", DataType.FP32, ("n", 3)), InputSpec("scale", DataType.FP32, ()))
    model = CONVERTER.open(
        lambda x, scale: {"log": tf.math.log1p(x) * scale, "exp": tf.math.expm1(x)}, ConvertOptions(inputs=inputs)
    )
    model.export(tmp_path / "model.onnx", 21)
    x = np.array([[1e-8, 0.0, 3.0], [-1.0, np.inf, 1e-3], [-1e-9, 80.0, -0.5]], np.float32)
    call = {"x": x, "scale": np.array(1.0, np.float32)}
    want, got = model.forward(call), run(tmp_path / "model.onnx", call)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
