from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import onnx
import pytest

import models
from penstock import artifact as artifact_module
from penstock.artifact import SUFFIXES, TITLES, Artifact, Format, listed, local_path, sha256
from penstock.errors import InvalidModel, NotFound, Unsupported


def test_from_file(tmp_path: Path) -> None:
    path = tmp_path / "Model.ONNX"
    path.write_bytes(b"model")
    artifact = Artifact.from_file(str(path))
    assert (artifact.data, artifact.format, artifact.path) == (b"model", Format.ONNX, path)
    assert artifact.digest == hashlib.sha256(b"model").hexdigest() == sha256(b"model")
    assert artifact.size_bytes == 5


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no model file"):
        Artifact.from_file(tmp_path / "m.onnx")


def test_a_pointer_of_git_lfs_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(InvalidModel, match="is a Git LFS pointer") as refusal:
        Artifact.from_file(tmp_path / "m.onnx")
    assert "git lfs pull" in refusal.value.hint


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    with pytest.raises(InvalidModel, match="is empty"):
        Artifact.from_file(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("m.pt", Format.TORCHSCRIPT),
        ("m.pt2", Format.EXPORTED_PROGRAM),
        ("m.tflite", Format.TFLITE),
        ("m.py", Format.PYTHON),
        ("m.xml", Format.OPENVINO_IR),
    ],
)
def test_one_file_of_each_format(name: str, format: Format, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"model")
    (tmp_path / "other.bin").write_bytes(b"not the model's")
    artifact = Artifact.from_file(tmp_path / name)
    assert (artifact.data, artifact.format, artifact.path) == (b"model", format, tmp_path / name)
    assert (artifact.digest, artifact.size_bytes) == (sha256(b"model"), 5)


def test_weights_beside_an_openvino_model_are_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "m.xml").write_bytes(b"<net/>")
    (tmp_path / "m.bin").write_bytes(b"weights")
    first = Artifact.from_file(tmp_path / "m.xml")
    assert (first.data, first.size_bytes) == (b"<net/>", 13)
    (tmp_path / "m.bin").write_bytes(b"WEIGHTS")
    assert Artifact.from_file(tmp_path / "m.xml").digest != first.digest


@pytest.mark.parametrize(
    ("folder", "main", "format"),
    [("m.onnx", "model.onnx", Format.ONNX), ("model.savedmodel", "saved_model.pb", Format.SAVED_MODEL)],
)
def test_a_folder_is_one_model(folder: str, main: str, format: Format, tmp_path: Path) -> None:
    def write(root: Path, **files: bytes) -> Path:
        for name, data in files.items():
            file = root / folder / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        (root / folder / main).write_bytes(b"graph")
        return root / folder

    path = write(tmp_path / "1", a=b"1", b=b"22", sub__c=b"333")
    artifact = Artifact.from_file(path)
    assert (artifact.data, artifact.format, artifact.path) == (b"graph", format, path / main)
    assert artifact.size_bytes == 11
    # Whatever the order in which the files were made; not where one differs in name, place or bytes.
    assert Artifact.from_file(write(tmp_path / "2", sub__c=b"333", b=b"22", a=b"1")).digest == artifact.digest
    others = [{"a": b"1", "b": b"22", "sub__d": b"333"}, {"a": b"1", "b": b"22", "c": b"333"}, {"a": b"12", "b": b"2"}]
    digests = {
        Artifact.from_file(write(tmp_path / f"x{number}", **files)).digest for number, files in enumerate(others)
    }
    assert len(digests | {artifact.digest}) == 4


def test_folder_without_its_main_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").mkdir()
    with pytest.raises(NotFound, match=r"no model file .*m\.onnx/model\.onnx"):
        Artifact.from_file(tmp_path / "m.onnx")
    (tmp_path / "m.pt").mkdir()
    with pytest.raises(InvalidModel, match="cannot read model file .*it is not a file"):
        Artifact.from_file(tmp_path / "m.pt")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    with pytest.raises(InvalidModel, match="it is not a file"):
        Artifact.from_file(tmp_path / "m.onnx")
    (tmp_path / "f.onnx").mkdir()
    (tmp_path / "f.onnx" / "model.onnx").write_bytes(b"graph")
    os.mkfifo(tmp_path / "f.onnx" / "weights")
    with pytest.raises(InvalidModel, match="'weights' in model folder .* is not a regular file"):
        Artifact.from_file(tmp_path / "f.onnx")


def test_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_module, "_MAX_FILES", 3)
    for name in ("saved_model.pb", "a", "b"):
        (tmp_path / name).write_bytes(b"1")
    assert Artifact.from_file(tmp_path).size_bytes == 3
    (tmp_path / "c").write_bytes(b"1")
    with pytest.raises(InvalidModel, match="contains more than 3 files"):
        Artifact.from_file(tmp_path)


@pytest.mark.parametrize("name", ["m.pkl", "m", "onnx"])
def test_unknown_suffix_lists_the_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="not a model file that Penstock reads") as caught:
        Artifact.from_file(tmp_path / name)
    assert caught.value.hint == f"use one of: {listed()}"


def test_the_list_names_every_format_with_its_file() -> None:
    shown = listed()
    assert shown.startswith("ONNX (.onnx), TorchScript (.pt), exported program (.pt2)")
    assert all(TITLES[format] in shown for format in Format)
    assert all(f"({suffix})" in shown for suffix in SUFFIXES)
    assert listed([Format.SAVED_MODEL]) == "SavedModel (folder with saved_model.pb)"


def test_external_data_of_an_onnx_file_is_part_of_it(tmp_path: Path) -> None:
    path = models.external_linear(tmp_path)
    (tmp_path / "stranger.bin").write_bytes(b"not the model's")
    first = Artifact.from_file(path)
    assert [entry.path for entry in first.beside] == ["w.bin"]
    assert first.size_bytes == len(first.data) + 24
    (tmp_path / "w.bin").write_bytes(bytes(24))
    assert Artifact.from_file(path).digest != first.digest
    (tmp_path / "w.bin").unlink()
    assert Artifact.from_file(path).beside == ()  # the engine says what is missing


@pytest.mark.parametrize("location", ["../w.bin", "/etc/hostname", "sub/../../w.bin"])
def test_external_data_outside_the_models_folder_is_not_read(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model" / "sub"
    folder.mkdir(parents=True)
    path = models.external_linear(folder)
    (folder / "w.bin").rename(tmp_path / "model" / "w.bin")
    model = onnx.load_model(path, load_external_data=False)
    (model.graph.initializer[0].external_data[0]).value = location
    path.write_bytes(model.SerializeToString())
    assert Artifact.from_file(path).beside == ()


def test_files_in_memory_are_the_same_model(tmp_path: Path) -> None:
    files = {"sub/c": b"333", "saved_model.pb": b"graph", "a": b"1"}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    on_disk = Artifact.from_file(tmp_path)
    assert on_disk.files() == files
    artifact = Artifact.from_files("saved_model.pb", files, Format.SAVED_MODEL)
    assert (artifact.digest, artifact.size_bytes, artifact.files()) == (on_disk.digest, 9, files)
    with artifact.on_disk() as path:
        assert path is not None
        folder = path.parent
        assert folder.stat().st_mode & 0o077 == 0
        assert {name: (folder / name).read_bytes() for name in files} == files
    assert not folder.exists()
    with on_disk.on_disk() as path:
        assert path == tmp_path / "saved_model.pb"
    with Artifact.from_bytes(b"1").on_disk() as path:
        assert path is None


def test_a_file_that_changed_since_it_was_digested_is_refused(tmp_path: Path) -> None:
    artifact = Artifact.from_file(models.external_linear(tmp_path))
    (tmp_path / "w.bin").write_bytes(bytes(24))
    with pytest.raises(InvalidModel, match=r"'w\.bin' changed while"):
        artifact.files()
    (tmp_path / "w.bin").unlink()
    with pytest.raises(InvalidModel, match=r"cannot read 'w\.bin'"):
        artifact.files()


def test_derive_keeps_the_way_it_came() -> None:
    first = Artifact.from_bytes(b"1", Format.ONNX)
    second = first.derive(b"2", "fold", {"level": 1}, {"nodes": 3})
    third = second.derive(b"3", "quantise", {}, {})
    assert first.provenance == ()
    assert [(step.name, step.source_digest) for step in third.provenance] == [
        ("fold", first.digest),
        ("quantise", second.digest),
    ]
    assert (third.provenance[0].options, third.provenance[0].facts) == ({"level": 1}, {"nodes": 3})
    assert (third.data, third.digest, third.path) == (b"3", sha256(b"3"), None)


def test_immutable() -> None:
    with pytest.raises(AttributeError):
        Artifact.from_bytes(b"1", Format.ONNX).data = b"2"  # type: ignore[misc]


@pytest.mark.parametrize(
    "address", ["s3://bucket/m.onnx", "gs://bucket/m.onnx", "as://account/m", "az://a/m", "S3://b/m.onnx"]
)
def test_an_object_store_is_called_what_it_is(address: str) -> None:
    for given in (address, Path(address)):
        message = (
            f"'{address}' is in an object store: object stores and URLs are not supported yet (copy it to a folder"
        )
        with pytest.raises(Unsupported, match=re.escape(message)):
            Artifact.from_file(given)


def test_a_url_is_called_what_it_is() -> None:
    with pytest.raises(Unsupported, match="'https://host/m.onnx' is a URL"):
        local_path("https://host/m.onnx")


def test_paths_that_only_look_like_addresses_are_paths() -> None:
    for given in ("s3", "s3/x.onnx", "a/s3:/b", "c:/m.onnx", "/s3:/x"):
        assert local_path(given) == Path(given)
