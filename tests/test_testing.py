from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.storage import StorageConformance
from penstock.artifact import Artifact, Format
from penstock.engines.base import Engine, LoadedModel, RequestModel
from penstock.errors import Unavailable, Unsupported
from penstock.request import InferRequest
from penstock.tensor import DataType
from penstock.testing import FakeEngine, FakeStreamingModel, MemoryStorage, assert_tensors_close

_ARTIFACT = Artifact.from_bytes(b"any", Format.ONNX)


def test_fake_engine_is_an_engine_whose_models_remember_their_calls() -> None:
    fake = FakeEngine()
    engine: Engine = fake
    model: LoadedModel = engine.load(_ARTIFACT, {})
    x = np.ones((3, 2), np.float32)
    model.signature.check({"x": x})
    assert_tensors_close(model.forward({"x": x}), {"y": 2 * x})
    assert [list(call) for call in fake.models[0].calls] == [["x"]]
    assert engine.validate(_ARTIFACT, {}) == []
    assert engine.estimate(_ARTIFACT, {}).memory_bytes == 3


def test_fake_model_ends_as_real_ones_do() -> None:
    model = FakeEngine().load(_ARTIFACT, {})
    model.unload()
    model.unload()
    with pytest.raises(Unavailable):
        model.forward({"x": np.ones((1, 2), np.float32)})


@pytest.mark.parametrize("datatype", list(DataType), ids=lambda d: d.value)
def test_equal_tensors_of_every_datatype_are_close(datatype: DataType) -> None:
    array = (
        np.array([b"a", b"b"], np.object_) if datatype is DataType.BYTES else np.array([0, 1]).astype(datatype.dtype)
    )
    assert_tensors_close({"y": array}, {"y": array.copy()})
    with pytest.raises(AssertionError):
        assert_tensors_close({"y": array}, {"y": array[::-1]})


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ({"z": np.ones(2)}, "names differ"),
        ({"y": np.ones(2, np.float32)}, "'y' is float32, expected float64"),
        ({"y": np.ones((2, 1))}, r"'y' has shape \(2, 1\), expected \(2,\)"),
        ({"y": np.array([1, 1.1])}, "'y'"),
        ({"y": np.array([1, np.nan])}, "'y'"),
    ],
)
def test_differences_are_told(actual: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_tensors_close(actual, {"y": np.ones(2)})


def test_the_fake_decoupled_model_answers_row_by_row_and_counts_what_ended() -> None:
    model: RequestModel = FakeStreamingModel()
    assert isinstance(model, RequestModel)
    assert not isinstance(FakeEngine().load(_ARTIFACT, {}), RequestModel)
    answers: list[Any] = []

    def answer(number: int, outcome: Any, final: bool) -> bool:
        answers.append(outcome and outcome["y"].tolist())
        return True

    request = InferRequest("m", {"x": np.array([[1, 2], [3, 4]], np.float32)})
    model.execute([request], answer)
    assert answers == [[[2, 4]], [[6, 8]], None]
    assert isinstance(model, FakeStreamingModel)
    assert (len(model.calls), model.closed) == (1, 1)
    model.unload()
    with pytest.raises(Unavailable):
        model.execute([request], answer)


class TestConformance(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> MemoryStorage:
        return MemoryStorage(tmp_path)


def test_memory_storage_without_a_folder_makes_no_local_copies() -> None:
    storage = MemoryStorage()
    storage.write("a", b"")
    with pytest.raises(Unsupported, match="construct it with 'scratch'"):
        storage.localize("a")
