"""TensorFlow Lite files: ONNX Runtime gives the outputs of LiteRT's interpreter, up to a step of quantised tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("tf2onnx")
pytest.importorskip("tensorflow")
pytest.importorskip("ai_edge_litert")

from benchmarks.zoo.tflite import MODELS
from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, PenstockError
from penstock.offline.convert.base import ConvertOptions, FrameworkModel, InputSpec
from penstock.offline.convert.frameworks.tflite import CONVERTER
from tensorflow_conversions import inputs_for, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

_FLOAT = [
    "lite_cnn",
    "lite_mobile",
    "lite_decoder",
    "lite_mlp",
    "lite_attention",
    "lite_embedding",
    "lite_float16",
    "lite_lstm",
]
_INTEGERS = ["lite_int8", "lite_uint8", "lite_int8_mlp", "lite_int8_decoder"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, model in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = Path(str(model.make(folder)))
    return made


def opened(path: Path, **options: Any) -> FrameworkModel:
    return CONVERTER.open(path, ConvertOptions(**options))


@pytest.mark.parametrize("name", _FLOAT)
def test_float_models_keep_their_outputs_and_values(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    model = opened(files[name])
    exported = model.export(tmp_path / "model.onnx", 21)
    written = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(written, full_check=True)
    inputs = inputs_for(model.signature)
    want, got = model.forward(inputs), run(tmp_path / "model.onnx", inputs)
    assert want.keys() == got.keys()
    for output, array in want.items():
        np.testing.assert_allclose(got[output], array, rtol=1e-4, atol=1e-5)
    del written.graph.output[:]
    written.graph.output.extend(onnx.ValueInfoProto(name=link.tensor) for link in exported.links)
    ours, theirs = (
        run(written.SerializeToString(), inputs),
        model.values(inputs, [link.source for link in exported.links]),
    )
    assert exported.links
    for link in exported.links:
        np.testing.assert_allclose(ours[link.tensor], theirs[link.source], rtol=1e-3, atol=1e-4, err_msg=link.tensor)


@pytest.mark.parametrize("name", _INTEGERS)
def test_quantised_models_keep_their_integers(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    model = opened(files[name])
    model.export(tmp_path / "model.onnx", 21)
    inputs = inputs_for(model.signature)
    want, got = model.forward(inputs), run(tmp_path / "model.onnx", inputs)
    for output, array in want.items():
        assert got[output].dtype == array.dtype
        steps = np.abs(got[output].astype(int) - array.astype(int))
        assert steps.max() <= 6
        assert steps.mean() < 0.6
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert kinds.count("QuantizeLinear") > 2


@pytest.mark.parametrize("name", ["lite_dynamic", "lite_dynamic_cnn"])
@pytest.mark.parametrize("rows", [1, 3])
def test_activations_of_integer_weights_are_quantised_as_litert_does(
    name: str, rows: int, files: dict[str, Path], tmp_path: Path
) -> None:
    model = opened(files[name])
    model.export(tmp_path / "model.onnx", 21)
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)
    inputs = inputs_for(model.signature, rows)
    inputs |= {
        input: array * np.arange(1, rows + 1).reshape(-1, *[1] * (array.ndim - 1)).astype("f")
        for input, array in inputs.items()
    }
    got = run(tmp_path / "model.onnx", inputs)
    for output, array in model.forward(inputs).items():
        np.testing.assert_allclose(got[output], array, rtol=1e-4, atol=1e-5)
    zeros = {input: np.zeros_like(array) for input, array in inputs.items()}
    for output, array in run(tmp_path / "model.onnx", zeros).items():
        np.testing.assert_allclose(array, model.forward(zeros)[output], rtol=1e-4, atol=1e-5)


def test_biases_of_64_bits_become_floats(files: dict[str, Path], tmp_path: Path) -> None:
    model = opened(files["lite_int16"])
    model.export(tmp_path / "model.onnx", 21)
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)
    inputs = inputs_for(model.signature)
    for output, array in model.forward(inputs).items():
        np.testing.assert_allclose(run(tmp_path / "model.onnx", inputs)[output], array, atol=1e-3)


def test_names_and_free_dimensions_are_those_of_the_signature(files: dict[str, Path]) -> None:
    model = opened(files["lite_mlp"], dynamic={"features": {0: "rows"}})
    assert model.signature.input_names == ["features"]
    assert sorted(model.signature.output_names) == ["logits", "score"]
    assert [axis.name for axis in model.axes["features"]] == ["rows"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": (InputSpec("picture", None, None),)}, "no input 'picture'"),
        ({"dynamic": {"image": {1: "height"}}}, "dimension 1 of the input 'image' cannot be free"),
        ({"outputs": ("mask",)}, "no output 'mask'"),
    ],
)
def test_options_that_contradict_the_file_are_rejected(options: Any, message: str, files: dict[str, Path]) -> None:
    with pytest.raises(InvalidArgument, match=message):
        opened(files["lite_cnn"], **options)


def test_wrong_shapes_are_rejected(files: dict[str, Path]) -> None:
    with pytest.raises(InvalidInput):
        opened(files["lite_cnn"]).forward({"image": np.zeros((1, 10, 10, 5), np.float32)})


@pytest.mark.parametrize("content", [b"", b"TFL3", b"\x00\x00\x00\x00TFL3", b"\x1c\x00\x00\x00TFL3" + bytes(64)])
def test_broken_files_are_rejected(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(content)
    with pytest.raises(InvalidModel):
        opened(tmp_path / "model.tflite")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_truncated_files_are_rejected(share: float, files: dict[str, Path], tmp_path: Path) -> None:
    data = files["lite_cnn"].read_bytes()
    (tmp_path / "model.tflite").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(PenstockError):
        opened(tmp_path / "model.tflite").export(tmp_path / "model.onnx", 21)
