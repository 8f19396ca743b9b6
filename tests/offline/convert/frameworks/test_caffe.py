from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.zoo.caffe import MODELS
from caffe_networks import image, opened
from converted import differences, export, inputs_of
from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, NotFound, PenstockError, Unsupported
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.offline.convert.frameworks.caffe import CONVERTER
from penstock.tensor import DataType

WORKING = [name for name, model in MODELS.items() if not model.diagnosis]
INPUT = 'input: "data" input_dim: 1 input_dim: 2 input_dim: {} input_dim: {}\n'


@pytest.mark.parametrize("name", WORKING)
def test_every_layer_of_the_zoo_agrees_with_numpy(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    source = CONVERTER.open(model.make(tmp_path), model.options)
    exported = export(source, tmp_path / "model.onnx")
    assert {spec.name for spec in source.signature.outputs} <= {link.tensor for link in exported.links}
    for batch in (1, 3):
        inputs = inputs_of(source, batch, batch)
        if name == "embedding":
            inputs = {name: np.abs(array * 5).round() for name, array in inputs.items()}
        assert not differences(source, exported, tmp_path / "model.onnx", inputs)


def test_opencv_computes_the_same(tmp_path: Path) -> None:
    """OpenCV has a reader of its own, so this checks our formulas, and not only that ONNX agrees with them."""
    cv2 = pytest.importorskip("cv2")
    for name in ("lenet", "googlenet", "resnet", "mobilenet", "ssd", "squeezenet", "light_cnn", "old_lenet"):
        model = MODELS[name]
        path = model.make(tmp_path)
        assert isinstance(path, Path)
        source = CONVERTER.open(path, model.options)
        inputs = inputs_of(source, 1)
        network = cv2.dnn.readNetFromCaffe(str(path), str(path.with_suffix(".caffemodel")))
        network.setInput(inputs["data"])
        (expected,) = source.forward(inputs).values()
        np.testing.assert_allclose(network.forward(), expected, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_link_names_the_layer_and_its_line(tmp_path: Path) -> None:
    source = CONVERTER.open(MODELS["resnet"].make(tmp_path), ConvertOptions())
    links = {link.tensor: link.where for link in export(source, tmp_path / "model.onnx").links}
    assert links["res2"].startswith("resnet.prototxt:")
    # The ReLU works in place, so the result of the sum has a name of its own.
    assert "layer 'res2_relu' (ReLU)" in links["res2"]
    assert "layer 'res2' (Eltwise)" in links["res2/res2"]


def test_a_missing_shape_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="the shape of input 'data' is not in the network") as caught:
        CONVERTER.open(MODELS["trained"].make(tmp_path), ConvertOptions())
    assert caught.value.hint.startswith('--inputs "data:float32[')
    sample = {"data": np.zeros((2, 1, 28, 28), np.float32)}
    source = CONVERTER.open(MODELS["trained"].make(tmp_path), ConvertOptions(sample=sample))
    assert source.signature.inputs[0].shape == (-1, 1, 28, 28)


def test_outputs_can_be_chosen(tmp_path: Path) -> None:
    source = CONVERTER.open(MODELS["lenet"].make(tmp_path), ConvertOptions(outputs=("pool1",)))
    exported = export(source, tmp_path / "model.onnx")
    assert [spec.name for spec in source.signature.outputs] == ["pool1"]
    assert len(exported.links) == 2
    with pytest.raises(InvalidArgument, match="no layer writes the output 'nothing'"):
        CONVERTER.open(MODELS["lenet"].make(tmp_path), ConvertOptions(outputs=("nothing",)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ConvertOptions(inputs=(InputSpec("image", None, (1,)),)), "no input 'image'"),
        (ConvertOptions(dynamic={"image": {0: "n"}}), "no input 'image'"),
        (ConvertOptions(dynamic={"data": {7: "n"}}), "no axis 7"),
        (ConvertOptions(inputs=(InputSpec("data", DataType.UINT8, None),)), "is float32 in Caffe"),
        (ConvertOptions(inputs=(InputSpec("data", None, (1, 784)),)), "has 4 dimensions, not 2"),
        (ConvertOptions(inputs=(InputSpec("data", None, (1, 1, 30, 30)),)), r"layer 'ip1' \(InnerProduct, line 6\)"),
        (ConvertOptions(inputs=(InputSpec("data", None, (1, 1, 0, 28)),)), "impossible or too large"),
        (ConvertOptions(inputs=(InputSpec("data", None, (1, 1, 10**6, 10**6)),)), "impossible or too large"),
        (ConvertOptions(sample={"data": np.zeros((1, 1, 2, 2), np.float32)}), "layer 'conv1'"),
    ],
)
def test_wrong_options_are_explained(options: ConvertOptions, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        CONVERTER.open(MODELS["lenet"].make(tmp_path), options)


def test_a_layer_that_fixes_the_size_of_the_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"layer 'ip1' .* at another size"):
        CONVERTER.open(MODELS["lenet"].make(tmp_path), ConvertOptions(dynamic={"data": {2: "height"}}))
    with pytest.raises(Unsupported, match=r"layer 'conv4_3_norm_mbox_priorbox' depends on the size of its inputs"):
        CONVERTER.open(MODELS["ssd"].make(tmp_path), ConvertOptions(dynamic={"data": {2: "height"}}))


def test_a_layer_that_fixes_the_batch_makes_it_fixed(tmp_path: Path) -> None:
    net = image(5, 4)
    net.add("rows", "Reshape", "data", "reshape_param { shape { dim: 5 dim: 2 dim: 2 } }")
    net.weights["x"] = [net.random(1)]
    source = opened(net, tmp_path)
    assert source.signature.inputs[0].shape == (5, 4)
    assert (
        export(source, tmp_path / "model.onnx").warnings[0].startswith("the batch size is fixed, because layer 'rows'")
    )


def test_inputs_of_another_size_are_refused(tmp_path: Path) -> None:
    model = MODELS["fcn"]
    source = CONVERTER.open(model.make(tmp_path), model.options)
    with pytest.raises(InvalidInput):
        source.forward({"data": np.zeros((0, 3, 32, 32), np.float32)})
    with pytest.raises(InvalidArgument):
        source.forward({"data": np.zeros((1, 4, 32, 32), np.float32)})


def test_the_least_size_of_a_free_axis_is_found(tmp_path: Path) -> None:
    net = image(1, 1, 32, 32)
    net.convolution("conv", "data", 1, 1, "kernel_size: 5", (5, 5))
    net.add("pool", "Pooling", "conv", "pooling_param { kernel_size: 3 }")
    source = opened(net, tmp_path, ConvertOptions(dynamic={"data": {2: "h", 3: "w"}}))
    assert [(axis.name, axis.low) for axis in source.axes["data"]] == [("h", 7), ("w", 7)]


def test_weights_elsewhere_and_the_weights_alone(tmp_path: Path) -> None:
    path = MODELS["lenet"].make(tmp_path)
    assert isinstance(path, Path)
    assert CONVERTER.open(path.with_suffix(".caffemodel"), ConvertOptions()).signature.output_names == ["prob"]
    moved = path.with_suffix(".caffemodel").rename(tmp_path / "iter_10000.bin")
    with pytest.raises(NotFound, match="no file with the weights"):
        CONVERTER.open(path, ConvertOptions())
    assert CONVERTER.open(path, ConvertOptions(weights=moved)).signature.output_names == ["prob"]


def test_a_binary_file_as_the_network(tmp_path: Path) -> None:
    MODELS["lenet"].make(tmp_path)
    (tmp_path / "lenet.prototxt").write_bytes((tmp_path / "lenet.caffemodel").read_bytes())
    with pytest.raises(InvalidModel, match="not text, but binary data"):
        CONVERTER.open(tmp_path / "lenet.prototxt", ConvertOptions())


def test_no_damaged_byte_of_the_text_causes_a_traceback(tmp_path: Path) -> None:
    path = MODELS["light_cnn"].make(tmp_path)
    assert isinstance(path, Path)
    text = path.read_bytes()
    for place, byte in itertools.product(range(0, len(text), 9), b'\x000-{":'):
        path.write_bytes(text[:place] + bytes([byte]) + text[place + 1 :])
        with contextlib.suppress(PenstockError):
            CONVERTER.open(path, ConvertOptions())


@pytest.mark.parametrize("opset", [19, 23])
def test_other_opsets(opset: int, tmp_path: Path) -> None:
    source = CONVERTER.open(MODELS["googlenet"].make(tmp_path), ConvertOptions())
    exported = export(source, tmp_path / "model.onnx", opset)
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == opset
    assert not differences(source, exported, tmp_path / "model.onnx", inputs_of(source, 2))


def test_an_opset_that_is_too_old(tmp_path: Path) -> None:
    source = CONVERTER.open(MODELS["lenet"].make(tmp_path), ConvertOptions())
    with pytest.raises(Unsupported, match="cannot be written with opset 11"):
        source.export(tmp_path / "model.onnx", 11)
