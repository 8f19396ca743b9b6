from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

import models
import penstock
from bundles import manifest_for, packed
from penstock.artifact import Artifact
from penstock.bundle.manifest import ServingConfig, Variant
from penstock.engines.registry import get_engine
from penstock.errors import IntegrityError, InvalidArgument, InvalidModel, NotFound, Unavailable, Unsupported
from penstock.runtime import Model
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel

LINEAR = models.linear(3, 2)
X = np.random.default_rng(0).random((10, 3), np.float32)
Y = X @ models.linear_weight(3, 2)


def bundle(folder: Path, artifact: Artifact = LINEAR, **changes: object) -> Path:
    return packed(folder / "test.bundle", {"model.onnx": artifact.data}, **changes)


def written(folder: Path, artifact: Artifact) -> Path:
    path = folder / "plain.onnx"
    path.write_bytes(artifact.data)
    return path


def test_a_bundle_opens_and_answers(tmp_path: Path) -> None:
    with penstock.open(bundle(tmp_path)) as model:
        assert model.name == "test"
        assert model.variant is not None
        assert model.variant.name == "fp32"
        assert model.manifest is not None
        assert model.signature.input_names == ["x"]
        np.testing.assert_allclose(model.infer({"x": X})["y"], Y, rtol=1e-5)


def test_a_folder_and_a_text_path_open_too(tmp_path: Path) -> None:
    with penstock.open(str(bundle(tmp_path))) as model:
        assert model.infer({"x": X})["y"].shape == (10, 2)
    packed(tmp_path / "folder", {"model.onnx": LINEAR.data}, folder=True)
    with penstock.open(tmp_path / "folder") as model:
        assert model.infer({"x": X})["y"].shape == (10, 2)


def test_a_plain_model_opens_under_its_name(tmp_path: Path) -> None:
    with penstock.open(written(tmp_path, LINEAR)) as model:
        assert (model.name, model.variant, model.manifest) == ("plain", None, None)
        np.testing.assert_allclose(model.infer({"x": X})["y"], Y, rtol=1e-5)


def test_a_python_model_needs_a_server(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("x = 1")
    with pytest.raises(Unsupported, match="runs only in a server .*penstock serve"):
        penstock.open(tmp_path / "model.py")


def test_lists_are_taken_where_their_type_fits(tmp_path: Path) -> None:
    path = written(tmp_path, models.increment(DataType.INT64))
    with penstock.open(path) as model:
        assert model.infer({"x": [1, 2]})["y"].tolist() == [2, 3]


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with penstock.open(bundle(tmp_path)) as model:
        with pytest.raises(InvalidArgument, match="unexpected inference input 'z'"):
            model.infer({"x": X, "z": X})
        with pytest.raises(InvalidArgument, match="data-type is 'FP64'"):
            model.infer({"x": X.astype(np.float64)})
        with pytest.raises(InvalidArgument, match="unexpected shape"):
            model.infer({"x": X[:, :2]})


@pytest.mark.parametrize("batch", [None, 1, 3, 100])
def test_rows_are_inferred_in_batches(tmp_path: Path, batch: int | None) -> None:
    with penstock.open(bundle(tmp_path)) as model:
        np.testing.assert_allclose(model.infer_rows({"x": X}, batch)["y"], Y, rtol=1e-5)


def test_the_batch_is_the_one_that_the_bundle_was_tuned_for() -> None:
    manifest = manifest_for({}, serving=ServingConfig("fp32", 1, 1, max_batch=4))
    fake = FakeModel()
    Model("fake", fake, manifest=manifest).infer_rows({"x": np.ones((10, 2), np.float32)})
    assert [len(call["x"]) for call in fake.calls] == [4, 4, 2]
    plain = FakeModel()
    Model("fake", plain).infer_rows({"x": np.ones((40, 2), np.float32)})
    assert [len(call["x"]) for call in plain.calls] == [32, 8]


def test_a_fixed_batch_is_kept_whatever_is_asked_for(tmp_path: Path) -> None:
    with penstock.open(written(tmp_path, models.fixed_batch())) as model:
        np.testing.assert_array_equal(model.infer_rows({"x": X}, batch=8)["y"], -X)


def test_answers_without_an_axis_become_rows() -> None:
    signature = Signature((TensorSpec("x", DataType.FP32, (1, 3)),), (TensorSpec("y", DataType.FP32, ()),))
    model = Model("sum", FakeModel(signature, lambda inputs: {"y": inputs["x"].sum()}))
    np.testing.assert_allclose(model.infer_rows({"x": X})["y"], X.sum(axis=1), rtol=1e-6)


def joined(x: list[int | str], nodes: list[tuple[str, list[str], list[str]]], rows: int = 10) -> dict[str, np.ndarray]:
    """The outputs of a model from x, of shape ``x``, for ``rows`` rows in calls of the size that the model allows."""
    value = DataType.FP32.onnx
    outputs = [(names[0], value, None) for _, _, names in nodes]
    artifact = models.artifact(nodes, [("x", value, x)], outputs, {"c": np.float32([1, 2, 3])})
    loaded = get_engine("onnxruntime").load(artifact, {})
    return Model("joined", loaded).infer_rows({"x": X[:rows]})


@pytest.mark.parametrize("rows", [1, 2, 3, 10])
def test_outputs_are_joined_along_their_axis_of_rows(rows: int) -> None:
    x = X[:rows]
    found = joined(["N", 3], [("Transpose", ["x"], ["t"]), ("Neg", ["x"], ["n"])], rows)
    np.testing.assert_array_equal(found["t"], x.T)
    np.testing.assert_array_equal(found["n"], -x)


@pytest.mark.parametrize("rows", [1, 2, 10])
def test_an_output_that_no_row_changes_is_returned_once(rows: int) -> None:
    found = joined(["N", 3], [("Neg", ["c"], ["k"]), ("Neg", ["x"], ["n"])], rows)
    np.testing.assert_array_equal(found["k"], [-1, -2, -3])
    np.testing.assert_array_equal(found["n"], -X[:rows])


def test_results_of_calls_without_an_axis_of_rows_are_stacked() -> None:
    found = joined([2, 3], [("ReduceSum", ["x"], ["s"])])
    np.testing.assert_allclose(found["s"].ravel(), X.reshape(5, 6).sum(axis=1), rtol=1e-6)
    assert found["s"].shape == (5, 1, 1)


def test_an_output_whose_shape_depends_on_the_row_is_refused() -> None:
    signature = Signature((TensorSpec("x", DataType.FP32, (1, 3)),), (TensorSpec("y", DataType.FP32, (-1,)),))
    model = Model("boxes", FakeModel(signature, lambda inputs: {"y": np.zeros(2 + int(inputs["x"][0, 0] > 0.5))}))
    with pytest.raises(InvalidArgument, match="output 'y' has no axis of rows"):
        model.infer_rows({"x": X})


def test_rows_must_agree_and_be_there(tmp_path: Path) -> None:
    with penstock.open(written(tmp_path, models.sum_and_difference())) as model:
        rows = np.ones((3, 2), np.float32)
        with pytest.raises(InvalidArgument, match="differ in number of rows"):
            model.infer_rows({"a": rows, "b": rows[:2]})
        with pytest.raises(InvalidArgument, match="no rows"):
            model.infer_rows({"a": rows[:0], "b": rows[:0]})
        with pytest.raises(InvalidArgument):
            model.infer_rows({})


def test_inputs_with_a_default_may_be_given(tmp_path: Path) -> None:
    value = (DataType.FP32.onnx, ["N", 2])
    scale = models.artifact(
        [("Mul", ["x", "w"], ["y"])],
        [("x", *value), ("w", DataType.FP32.onnx, [2])],
        [("y", *value)],
        {"w": np.float32([2, 3])},
    )
    (tmp_path / "scale.onnx").write_bytes(scale.data)
    x = np.ones((1, 2), np.float32)
    with penstock.open(tmp_path / "scale.onnx") as model:
        assert model.infer({"x": x})["y"].tolist() == [[2, 3]]
        assert model.infer({"x": x, "w": np.float32([5, 7])})["y"].tolist() == [[5, 7]]
        with pytest.raises(InvalidArgument, match=r"unexpected shape for input 'w'. Expected \[2\], got \[3\]"):
            model.infer({"x": x, "w": np.ones(3, np.float32)})
        with pytest.raises(
            InvalidArgument, match=r"inputs \['w'\] have a default value in the model and cannot be split into rows"
        ):
            model.infer_rows({"x": x, "w": np.float32([5, 7])})


def test_inputs_of_unknown_rank_take_any_shape(tmp_path: Path) -> None:
    value = (DataType.FP32.onnx, None)
    negated = models.artifact([("Neg", ["x"], ["y"])], [("x", *value)], [("y", *value)])
    (tmp_path / "neg.onnx").write_bytes(negated.data)
    with penstock.open(tmp_path / "neg.onnx") as model:
        for shape in ((), (2,), (1, 2, 3)):
            np.testing.assert_array_equal(model.infer({"x": np.ones(shape, np.float32)})["y"], -np.ones(shape))
        with pytest.raises(InvalidArgument, match="data-type is 'INT32'"):
            model.infer({"x": np.ones(2, np.int32)})


def test_closing_gives_the_model_back(tmp_path: Path) -> None:
    model = penstock.open(bundle(tmp_path))
    model.close()
    model.close()
    with pytest.raises(Unavailable):
        model.infer({"x": X})


def test_the_first_variant_that_runs_here_is_taken(tmp_path: Path) -> None:
    lacking = Variant("int8", "model.onnx", "onnxruntime", "int8", requires=("no-such-isa",))
    missing = Variant("other", "model.onnx", "no-such-engine", "fp32")
    last = Variant("fallback", "model.onnx", "onnxruntime", "fp32")
    serving = ServingConfig("int8", 1, 1, 1)
    path = bundle(tmp_path, variants=(lacking, missing, last), serving=serving)
    with penstock.open(path) as model:
        assert model.variant == last
    with pytest.raises(Unavailable, match="needs a CPU with no-such-isa"):
        penstock.open(packed(tmp_path / "none", {"model.onnx": LINEAR.data}, variants=(lacking,), serving=serving))


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no bundle or model") as raised:
        penstock.open(tmp_path / "none.bundle")
    assert "penstock build" in raised.value.hint
    (tmp_path / "text.bundle").write_text("not a bundle")
    with pytest.raises(IntegrityError, match="not a Penstock bundle"):
        penstock.open(tmp_path / "text.bundle")
    (tmp_path / "bad.onnx").write_text("not a model")
    with pytest.raises(InvalidModel):
        penstock.open(tmp_path / "bad.onnx")
    changed = bundle(tmp_path)
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    with pytest.raises(IntegrityError):
        penstock.open(changed)


def test_the_manifest_is_the_bundles_own(tmp_path: Path) -> None:
    with penstock.open(bundle(tmp_path, name="renamed")) as model:
        assert model.name == "renamed"
        assert msgspec.structs.asdict(model.manifest)["name"] == "renamed"
