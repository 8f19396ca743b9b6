"""The committed digits model and data are what their README says: accurate, small, unfolded, and free of test leakage."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture(scope="module")
def calibrate() -> dict[str, np.ndarray]:
    return dict(np.load(DIGITS / "calibrate.npz"))


@pytest.fixture(scope="module")
def evaluate() -> dict[str, np.ndarray]:
    return dict(np.load(DIGITS / "evaluate.npz"))


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return onnx.load(DIGITS / "model.onnx")


@pytest.fixture(scope="module")
def split() -> Any:
    pytest.importorskip("sklearn", reason="the split is made from the data that scikit-learn ships")
    return runpy.run_path(str(DIGITS / "data.py"))["load_split"]()


def images_of(image: np.ndarray) -> set[bytes]:
    return {one.tobytes() for one in image}


def test_accuracy_on_the_test_images(evaluate: dict[str, np.ndarray]) -> None:
    session = onnxruntime.InferenceSession(DIGITS / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"image": evaluate["image"]})
    assert logits.shape == (len(evaluate["labels"]), 10)
    assert np.mean(logits.argmax(1) == evaluate["labels"]) >= 0.98


def test_every_batch_size_gives_the_same_answers(evaluate: dict[str, np.ndarray]) -> None:
    session = onnxruntime.InferenceSession(DIGITS / "model.onnx", providers=["CPUExecutionProvider"])
    image = evaluate["image"][:7]
    (together,) = session.run(["logits"], {"image": image})
    alone = [session.run(["logits"], {"image": one[None]})[0][0] for one in image]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-4)


def test_data_arrays(calibrate: dict[str, np.ndarray], evaluate: dict[str, np.ndarray]) -> None:
    for data, count in ((calibrate, 300), (evaluate, 797)):
        assert set(data) == {"image", "labels"}
        assert data["image"].shape == (count, 1, 8, 8)
        assert data["image"].dtype == np.float32
        assert data["image"].min() == 0
        assert data["image"].max() == 1
        assert data["labels"].shape == (count,)
        assert data["labels"].dtype == np.int64
        assert set(data["labels"]) == set(range(10))


def test_no_test_image_calibrates(calibrate: dict[str, np.ndarray], evaluate: dict[str, np.ndarray]) -> None:
    assert not images_of(calibrate["image"]) & images_of(evaluate["image"])


def test_evaluate_is_the_declared_test_split(evaluate: dict[str, np.ndarray], split: Any) -> None:
    np.testing.assert_array_equal(evaluate["image"], split.test.image)
    np.testing.assert_array_equal(evaluate["labels"], split.test.labels)


def test_calibrate_is_the_declared_part_of_the_training_split(calibrate: dict[str, np.ndarray], split: Any) -> None:
    np.testing.assert_array_equal(calibrate["image"], split.calibrate.image)
    np.testing.assert_array_equal(calibrate["labels"], split.calibrate.labels)
    assert images_of(calibrate["image"]) <= images_of(split.train.image)


def test_the_split_leaks_nothing(split: Any) -> None:
    train, fit, validate, test = (
        images_of(part.image) for part in (split.train, split.fit, split.validate, split.test)
    )
    assert fit | validate == train
    assert not fit & validate
    assert not train & test
    assert len(split.train.labels) + len(split.test.labels) == 1797


def test_signature(model: onnx.ModelProto) -> None:
    def described(value: onnx.ValueInfoProto) -> tuple[str, int, list[str | int]]:
        tensor = value.type.tensor_type
        return value.name, tensor.elem_type, [d.dim_param or d.dim_value for d in tensor.shape.dim]

    assert [described(i) for i in model.graph.input] == [("image", onnx.TensorProto.FLOAT, ["batch", 1, 8, 8])]
    assert [described(o) for o in model.graph.output] == [("logits", onnx.TensorProto.FLOAT, ["batch", 10])]


def test_every_convolution_has_its_batch_norm_left_to_fold(model: onnx.ModelProto) -> None:
    convolutions = {node.output[0] for node in model.graph.node if node.op_type == "Conv"}
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert {norm.input[0] for norm in norms} == convolutions
    assert len(norms) == 8
    assert all(attribute.i == 0 for norm in norms for attribute in norm.attribute if attribute.name == "training_mode")


def test_model_is_small_and_self_contained(model: onnx.ModelProto) -> None:
    assert (DIGITS / "model.onnx").stat().st_size < 1_000_000
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    assert model.ir_version <= 10
    assert all(opset.version <= 20 for opset in model.opset_import)
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)
