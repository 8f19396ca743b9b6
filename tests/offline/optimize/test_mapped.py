"""Models that exceed the limit are written with external data and read without their weights. The limit is lowered, so that the
models are small.
"""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import networks
from penstock.artifact import Artifact
from penstock.errors import InvalidModel, Unsupported
from penstock.offline.optimize import mapped
from penstock.offline.optimize.mapped import array_of, artifact_of, is_mapped, tensor_of
from penstock.offline.optimize.model import check_one_file, read_proto, save, self_contained
from penstock.offline.sessions import loaded
from penstock.tensor import Array

X = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "LIMIT_BYTES", 8 << 10)
    monkeypatch.setattr(mapped, "LEAST_BYTES", 1 << 10)


@pytest.fixture
def small() -> Artifact:
    return networks.mlp()


@pytest.fixture
def outside(small: Artifact, tmp_path: Path) -> Path:
    """``small`` with its weights in an external file."""
    proto = onnx.load_model_from_string(small.data)
    onnx.save(proto, tmp_path / "net.onnx", save_as_external_data=True, location="net.bin", size_threshold=0)
    return tmp_path / "net.onnx"


def answer(artifact: Artifact, engine: str = "onnxruntime") -> Array:
    with loaded(artifact, engine=engine) as model:
        return model.forward({"x": X})["y"]


def mapped_names(artifact: Artifact) -> list[str]:
    return [tensor.name for tensor in read_proto(artifact).graph.initializer if is_mapped(tensor)]


@pytest.mark.usefixtures("low")
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_large_model_has_its_weights_in_a_file(small: Artifact, engine: str) -> None:
    pytest.importorskip(engine)
    made = artifact_of(read_proto(small))
    assert [entry.path for entry in made.beside] == ["model.onnx.data"]
    assert mapped_names(small) == []
    assert mapped_names(made) == ["w0", "w2", "w4"]
    np.testing.assert_allclose(answer(made, engine), answer(small, engine), rtol=1e-5, atol=1e-6)
    for one, other in zip(read_proto(made).graph.initializer, read_proto(small).graph.initializer, strict=True):
        np.testing.assert_array_equal(array_of(one), array_of(other))


@pytest.mark.usefixtures("low")
def test_the_same_model_has_the_same_digest(small: Artifact) -> None:
    made = artifact_of(read_proto(small))
    again, copied = artifact_of(read_proto(made)), artifact_of(read_proto(small))
    assert again.digest == made.digest == copied.digest
    assert copied.path is not None
    assert copied.path.parent not in (None if one.path is None else one.path.parent for one in (made, again))
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.usefixtures("low")
def test_the_files_live_as_long_as_the_artifact(small: Artifact) -> None:
    made = artifact_of(read_proto(small))
    assert made.path is not None
    path, folder = made.path, made.path.parent
    derived = made.derive(made, "step", {}, {})
    del made
    gc.collect()
    assert (folder / "model.onnx.data").is_file()
    assert derived.path == path
    del derived
    gc.collect()
    assert not folder.exists()


@pytest.mark.usefixtures("low")
def test_models_with_the_same_weights_share_a_file(small: Artifact) -> None:
    first = artifact_of(read_proto(small))
    assert first.path is not None
    proto = read_proto(first)
    proto.graph.output.add().CopyFrom(onnx.ValueInfoProto(name="hidden"))
    shown = artifact_of(proto)
    assert shown.path is not None
    assert (shown.path.parent, shown.beside) == (first.path.parent, first.beside)
    assert shown.digest != first.digest
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.zeros((16, 64), np.float32), "w0"))
    changed = artifact_of(proto)
    assert changed.path is not None
    assert changed.path.parent != first.path.parent
    del first, changed
    gc.collect()
    with loaded(shown) as model:
        assert set(model.forward({"x": X})) == {"y", "hidden"}


def test_below_the_limit_the_bytes_are_those_of_one_file(
    small: Artifact, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = self_contained(Artifact.from_file(outside))
    assert not wanted.beside
    monkeypatch.setattr(mapped, "LIMIT_BYTES", 8 << 10)
    monkeypatch.setattr(mapped, "LEAST_BYTES", 1 << 10)
    given = Artifact.from_file(outside)
    assert self_contained(given) is given
    proto = read_proto(given)
    assert any(map(is_mapped, proto.graph.initializer))
    monkeypatch.undo()
    found = artifact_of(proto)
    assert not found.beside
    assert [array_of(one).tobytes() for one in read_proto(found).graph.initializer] == [
        array_of(one).tobytes() for one in read_proto(wanted).graph.initializer
    ]
    np.testing.assert_array_equal(answer(wanted), answer(small))


@pytest.mark.usefixtures("low")
def test_a_large_model_is_saved_in_two_files(small: Artifact, outside: Path, tmp_path: Path) -> None:
    for number, artifact in enumerate((artifact_of(read_proto(small)), Artifact.from_file(outside))):
        target = tmp_path / f"saved{number}.onnx"
        save(artifact, target)
        saved = Artifact.from_file(target)
        assert [entry.path for entry in saved.beside] == [f"{target.name}.data"]
        onnx.checker.check_model(target)
        np.testing.assert_array_equal(answer(saved), answer(small))
    save(small, tmp_path / "one.onnx")
    assert (tmp_path / "one.onnx").read_bytes() == small.data


@pytest.mark.usefixtures("low")
def test_what_needs_one_file_is_refused(small: Artifact, outside: Path) -> None:
    check_one_file(small, "training")
    with pytest.raises(Unsupported, match="but training supports only models below 2 GiB"):
        check_one_file(Artifact.from_file(outside), "training")


@pytest.mark.usefixtures("low")
def test_a_truncated_file_is_invalid(outside: Path) -> None:
    with outside.with_name("net.bin").open("r+b") as file:
        file.truncate(20_000)
    with pytest.raises(InvalidModel, match="external data of 'w.' cannot be read: it takes"):
        read_proto(Artifact.from_file(outside))


@given(
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    datatype=st.sampled_from(["FLOAT", "FLOAT16", "BFLOAT16", "INT8", "INT64", "BOOL", "DOUBLE", "INT4"]),
    data=st.data(),
)
def test_views_of_mapped_tensors_are_mapped_and_equal(shape: list[int], datatype: str, data: st.DataObject) -> None:
    kind = onnx.TensorProto.DataType.Value(datatype)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
    given = np.random.default_rng(0).integers(-3, 4, shape).astype(dtype)
    graph = onnx.helper.make_graph([], "g", [], [], [onnx.numpy_helper.from_array(given, "w")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "LIMIT_BYTES", 0)
        patch.setattr(mapped, "LEAST_BYTES", data.draw(st.integers(1, 64)))
        proto = onnx.helper.make_model(graph)
        made = artifact_of(proto)
        (tensor,) = onnx.load_model_from_string(made.data).graph.initializer
        if not is_mapped(tensor):
            assert mapped.size_of(tensor) < mapped.LEAST_BYTES or datatype == "INT4"
            np.testing.assert_array_equal(array_of(tensor), given)
            return
        assert made.path is not None
        offset = int(next(entry.value for entry in tensor.external_data if entry.key == "offset"))
        mapped.map_tensor(tensor, str(made.path.with_name(mapped.WEIGHTS)), offset)
        array = array_of(tensor)
        np.testing.assert_array_equal(array, given)
        start = data.draw(st.integers(0, shape[0]))
        stop = data.draw(st.integers(start, shape[0]))
        for view, is_part in ((array[start:stop], True), (array.reshape(-1), True), (array.T, len(shape) == 1)):
            copied = tensor_of(view, "v")
            np.testing.assert_array_equal(array_of(copied), view)
            assert is_mapped(copied) or not is_part or not view.size


@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), block=st.integers(1, 40))
def test_row_slices_cover_an_array_once(shape: list[int], block: int) -> None:
    array = np.arange(np.prod(shape)).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "_BLOCK_ELEMENTS", block)
        parts = [array[rows] for rows in mapped.row_slices(array)]
    assert all(len(part) == 1 or part.size <= block for part in parts)
    np.testing.assert_array_equal(np.concatenate([*parts, array[:0]]), array)
