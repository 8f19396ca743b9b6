from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import models
from penstock.errors import InvalidModel, NotFound, PenstockError, Unsupported
from penstock.offline.convert.detect import detect
from penstock.protocol.varint import write_varint


def field(number: int, value: bytes | int) -> bytes:
    """One field of a protobuf message."""
    if isinstance(value, int):
        return write_varint(number << 3) + write_varint(value)
    return write_varint(number << 3 | 2) + write_varint(len(value)) + value


def zipped(*names: str, content: bytes = b"x") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, content)
    return buffer.getvalue()


def ubjson(key: str) -> bytes:
    return b"{L" + struct.pack(">q", len(key)) + key.encode() + b"{}}"


NODE = field(1, field(1, b"x") + field(2, b"Placeholder"))
BLOCK = field(1, field(1, 0) + field(2, 0))
FILES: dict[str, tuple[bytes, str]] = {
    "model.onnx": (models.linear(3, 2).data, "onnx"),
    "odd.bin": (models.linear(3, 2).data, "onnx"),
    "net.keras": (zipped("metadata.json", "config.json", "model.weights.h5"), "keras"),
    "net.h5": (b"\x89HDF\r\n\x1a\n" + b"\0" * 8, "keras"),
    "graph.pb": (NODE + NODE + field(4, field(1, 1987)), "graph_def"),
    "net.tflite": (b"\x1c\0\0\0TFL3" + b"\0" * 20, "tflite"),
    "net.safetensors": (struct.pack("<Q", 2) + b"{}", "state_dict"),
    "pipe.skops": (zipped("schema.json", "1.npy"), "sklearn"),
    "pipe.pkl": (pickle.dumps({"a": 1}), "sklearn"),
    "pipe.joblib": (b"\x1f\x8b" + b"\0" * 20, "sklearn"),
    "net.pth": (pickle.dumps({"a": 1}), "torch_pickle"),
    "trees.json": (json.dumps({"learner": {}, "version": [3, 0, 0]}).encode(), "xgboost"),
    "trees.ubj": (ubjson("learner"), "xgboost"),
    "trees.txt": (b"tree\nversion=v4\nnum_class=1\n", "lightgbm"),
    "trees.cbm": (b"CBM1" + b"\0" * 20, "catboost"),
    "cat.json": (json.dumps({"oblivious_trees": [], "features_info": {}}).encode(), "catboost"),
    "inference.json": (json.dumps({"base_code": {"magic": "pir"}, "program": {}}).encode(), "paddle"),
    "inference.pdmodel": (BLOCK + field(4, field(1, 0)), "paddle"),
    "net.prototxt": (b'name: "LeNet"\n# a comment\nlayer {\n  name: "data"\n}\n', "caffe"),
    "old.prototxt": (b'input: "data"\ninput_dim: 1\nlayers { }\n', "caffe"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, name: str) -> None:
    data, format = FILES[name]
    (tmp_path / name).write_bytes(data)
    assert detect(tmp_path / name) == format


@pytest.mark.parametrize("name", FILES)
def test_the_content_decides_rather_than_the_suffix(tmp_path: Path, name: str) -> None:
    data, format = FILES[name]
    (tmp_path / "model.dat").write_bytes(data)
    # A compressed pickle looks like any compressed file, and a pickle of unknown content is an estimator.
    if name not in ("pipe.joblib", "net.pth"):
        assert detect(tmp_path / "model.dat") == format


def test_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(3, 2)
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    torch.save({"epoch": 1, "model": net.state_dict()}, tmp_path / "checkpoint.pt")
    torch.save(net.state_dict(), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(net, tmp_path / "module.pt")
    torch.save(net, tmp_path / "legacy_module.pt", _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(net), tmp_path / "script.pt")
    torch.export.save(torch.export.export(net, (torch.zeros(1, 3),)), tmp_path / "program.pt2")
    assert {file.stem: detect(file) for file in tmp_path.iterdir()} == {
        "program": "exported_program",
        "weights": "state_dict",
        "checkpoint": "state_dict",
        "legacy": "state_dict",
        "module": "torch_pickle",
        "legacy_module": "torch_pickle",
        "script": "torchscript",
    }


def test_exported_programs(tmp_path: Path) -> None:
    (tmp_path / "a.pt2").write_bytes(zipped("a/archive_format", "a/models/model.json"))
    (tmp_path / "old.pt2").write_bytes(zipped("version", "serialized_exported_program.json"))
    assert {detect(file) for file in tmp_path.iterdir()} == {"exported_program"}


@pytest.mark.parametrize(
    ("files", "format"),
    [
        ({"saved_model.pb": b"x", "variables/a": b""}, "saved_model"),
        ({"config.json": b'{"model_type": "bert"}', "model.safetensors": b""}, "huggingface"),
        ({"inference.pdmodel": b"x", "inference.pdiparams": b""}, "paddle"),
        ({"inference.json": b"{}", "inference.pdiparams": b""}, "paddle"),
        ({"model.onnx": b"x"}, "onnx"),
    ],
)
def test_folders(tmp_path: Path, files: dict[str, bytes], format: str) -> None:
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert detect(tmp_path) == format


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        ("a.onnx", b"", InvalidModel, "is empty"),
        ("a.onnx", b"version https://git-lfs.github.com/spec/v1\n", InvalidModel, "Git LFS pointer"),
        ("a.onnx", models.linear(3, 2).data[:-20], InvalidModel, "truncated or corrupt"),
        ("a.onnx", b"\xff" * 100, InvalidModel, "truncated or corrupt"),
        ("a.keras", FILES["net.keras"][0][:-30], InvalidModel, "truncated or corrupt archive"),
        ("a.json", b'{"learner": ', InvalidModel, "truncated or corrupt JSON"),
        ("a.json", b'{"class_name": "Functional"}', Unsupported, "Keras model without weights"),
        ("config.json", b'{"model_type": "bert"}', Unsupported, "configuration of a Hugging Face model"),
        ("model.json", b'{"modelTopology": {}}', Unsupported, "TensorFlow.js"),
        ("a.npz", zipped("x.npy"), Unsupported, "contains arrays"),
        ("a.bundle", zipped("manifest.json", "manifest.sha256"), Unsupported, "is a bundle"),
        ("a.zip", zipped("m/saved_model.pb"), Unsupported, "an archive with a model in it"),
        ("a.pt.gz", b"\x1f\x8b" + b"\0" * 9, Unsupported, "is compressed"),
        ("a.gguf", b"GGUF\3\0\0\0", Unsupported, "GGUF"),
        ("a.pbtxt", b"node { }", Unsupported, "graph as text"),
        ("net.py", b"import torch\n", Unsupported, "is a text, not a model"),
        ("a.caffemodel", field(1, b"net") + field(100, b""), Unsupported, "not a model that Penstock recognises"),
        ("noise.bin", b"\x0d\x00\xfe\xff" * 40, Unsupported, "not a model that Penstock recognises"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, data: bytes, error: type[PenstockError], message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=message) as raised:
        detect(tmp_path / name)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ((), InvalidModel, "is empty"),
        (("_CHECKPOINT_METADATA",), Unsupported, "a checkpoint"),
        (("readme.txt",), Unsupported, "not a model that Penstock recognises"),
    ],
)
def test_wrong_folders(tmp_path: Path, names: tuple[str, ...], error: type[PenstockError], message: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(error, match=message) as raised:
        detect(tmp_path)
    assert raised.value.hint


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no model"):
        detect(tmp_path / "absent")
    with pytest.raises(InvalidModel, match="not a regular file"):
        detect(Path("/dev/null"))
    (tmp_path / "a.mlmodel").write_bytes(field(1, 9))
    with pytest.raises(Unsupported, match="Core ML"):
        detect(tmp_path / "a.mlmodel")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_damaged_files_are_detected_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = bytearray(FILES[name][0])
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[position] ^= data.draw(st.integers(1, 255))
    (tmp_path / name).write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        assert detect(tmp_path / name)
    except PenstockError as error:
        assert error.hint  # noqa: PT017
