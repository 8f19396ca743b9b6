"""The teacher's outputs are ONNX Runtime's, and a cache is used only if it is complete and belongs to this model and data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto

from networks import Network, cnn, mlp
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.offline.compress.training import teacher as teacher_module
from penstock.offline.compress.training.teacher import Teacher

X = np.random.default_rng(1).normal(size=(100, 16)).astype(np.float32)


@pytest.fixture
def data() -> Dataset:
    return make_dataset({"x": X}, None)


def test_answers_are_those_of_onnx_runtime(data: Dataset) -> None:
    session = onnxruntime.InferenceSession(mlp().data, providers=["CPUExecutionProvider"])
    known = Teacher(mlp(), data, also=["hidden", "y"])
    assert known.answers.keys() == {"y", "hidden"}
    np.testing.assert_allclose(known.answers["y"], session.run(["y"], {"x": X})[0], rtol=1e-5, atol=1e-5)
    assert (known.answers["hidden"] >= 0).all()
    rows = torch.tensor([5, 2])
    assert np.array_equal(known({}, rows)["y"].numpy(), known.answers["y"][[5, 2]])


def test_a_live_teacher_answers_what_it_is_shown(data: Dataset) -> None:
    known = Teacher(mlp(), data, live=True)
    shown = known({"x": torch.tensor(X[[7, 3]])}, torch.tensor([0, 0]))
    np.testing.assert_allclose(shown["y"].numpy(), known.answers["y"][[7, 3]], rtol=1e-5, atol=1e-5)


def test_a_model_of_fixed_batch() -> None:
    rows = make_dataset({"x": np.random.default_rng(0).normal(size=(6, 3, 12, 12)).astype(np.float32)}, None)
    fixed, free = (Teacher(cnn(8, batch), rows, live=True) for batch in (2, "N"))
    np.testing.assert_allclose(fixed.answers["y"], free.answers["y"], rtol=1e-4, atol=1e-5)
    shown = fixed({"x": torch.tensor(rows.inputs["x"][:4])}, torch.arange(4))
    np.testing.assert_allclose(shown["y"].numpy(), free.answers["y"][:4], rtol=1e-4, atol=1e-5)


def test_a_cache_is_read_instead_of_computed(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Teacher(mlp(), data, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(teacher_module, "answers", lambda *_: pytest.fail("computed again"))
        again = Teacher(mlp(), data, cache=tmp_path)
    assert np.array_equal(again.answers["y"], first.answers["y"])
    # Another model, other data and other tensors have files of their own.
    Teacher(mlp(width=32), data, cache=tmp_path)
    Teacher(mlp(), make_dataset({"x": X[:50]}, None), cache=tmp_path)
    Teacher(mlp(), data, also=["hidden"], cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    assert np.array_equal(Teacher(mlp(), data, cache=tmp_path).answers["y"], first.answers["y"])
    assert file.read_bytes() != bytes(damaged)


def test_answers_that_would_not_fit_are_refused_before_they_are_computed(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_module, "usable_memory", lambda: 1000)
    monkeypatch.setattr(teacher_module, "answers", lambda *_: pytest.fail("computed"))
    with pytest.raises(ResourceExhausted, match="outputs for 100 samples need"):
        Teacher(mlp(), data)


def test_unknown_tensors_are_named(data: Dataset) -> None:
    with pytest.raises(InvalidArgument, match=r"no tensor \['hiden'\]"):
        Teacher(mlp(), data, also=["hiden"])


def test_text_among_the_answers_teaches_nothing() -> None:
    n = Network()
    n.op("Relu", "x", name="y")
    n.op("Cast", "x", name="told", to=TensorProto.STRING)
    proto = onnx.load_model_from_string(n.artifact({"x": ["N", 4]}, {"y": ["N", 4], "told": ["N", 4]}).data)
    proto.graph.output[1].type.tensor_type.elem_type = TensorProto.STRING
    telling = Artifact.from_bytes(proto.SerializeToString())
    assert Teacher(telling, make_dataset({"x": X[:8, :4]}, None)).answers.keys() == {"y"}
