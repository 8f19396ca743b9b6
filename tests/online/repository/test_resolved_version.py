"""Targets on the command line and folders of versions: what is served, by which engine, under which name and version."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

import models
from bundles import packed
from penstock.artifact import Format, sha256
from penstock.bundle.manifest import ServingConfig, Variant
from penstock.bundle.pack_model import pack_model
from penstock.errors import AlreadyExists, IntegrityError, InvalidConfig, Unavailable
from penstock.online.repository.resolved_version import DEFAULT_MAX_BATCH, LoadOptions, define, find
from penstock.resources import machine_facts

LINEAR = models.linear()


def onnx(folder: Path, name: str = "linear") -> Path:
    path = folder / f"{name}.onnx"
    path.write_bytes(LINEAR.data)
    return path


def test_a_model_file_is_named_after_its_file_and_runs_on_the_usual_engine(tmp_path: Path) -> None:
    (source,) = define([str(onnx(tmp_path))])
    found = find(source, "1")
    assert (found.name, found.version, found.engine, found.max_batch) == (
        "linear",
        "1",
        "onnxruntime",
        DEFAULT_MAX_BATCH,
    )
    assert (found.artifact.digest, found.instances, found.platform) == (LINEAR.digest, 1, "onnxruntime_onnx")
    assert found.options["threads"] >= 1


def test_a_bundle_has_its_own_name_and_version_and_is_served_as_it_was_tuned(tmp_path: Path) -> None:
    variant = Variant("tuned", "model.onnx", "onnxruntime", "fp32", options={"threads": 1, "arena": False})
    serving = ServingConfig("tuned", 1, 1, max_batch=4)
    files = {"model.onnx": LINEAR.data}
    path = packed(
        tmp_path / "a.bundle", files, variants=(variant,), serving=serving, version="12", machine=machine_facts()
    )
    (source,) = define([path])
    found = find(source, "12")
    assert (found.name, found.version, found.engine, found.max_batch) == ("test", "12", "onnxruntime", 4)
    assert found.options == {"threads": 1, "arena": False}
    assert found.artifact.digest == sha256(LINEAR.data)


def test_load_options_go_before_what_the_bundle_was_tuned_for(tmp_path: Path) -> None:
    pack_model(LINEAR, tmp_path / "a.bundle")
    (source,) = define([tmp_path / "a.bundle"])
    found = find(source, "1", LoadOptions(max_batch=2, instances=3, isolation="process", processes=2))
    assert (found.max_batch, found.instances, found.load_options.isolation, found.cores) == (2, 3, "process", ())


def test_a_bundle_with_several_files_comes_with_all_of_them(tmp_path: Path) -> None:
    pack_model(models.external_linear(tmp_path), tmp_path / "a.bundle")
    (tmp_path / "w.bin").unlink()
    (source,) = define([tmp_path / "a.bundle"])
    artifact = find(source, "1").artifact
    assert (artifact.format, artifact.path, set(artifact.files())) == (Format.ONNX, None, {"m.onnx", "w.bin"})


def test_a_fallback_and_another_machine_are_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Variant("fast", "model.onnx", "onnxruntime", "int8", requires=("no-such-isa",))
    second = Variant("plain", "model.onnx", "onnxruntime", "fp32")
    changes = {"serving": ServingConfig("fast", 1, 1, 1), "variants": (first, second)}
    packed(tmp_path / "a.bundle", {"model.onnx": LINEAR.data}, **changes)
    (source,) = define([tmp_path / "a.bundle"])
    with caplog.at_level(logging.WARNING):
        assert find(source, "1").artifact.data == LINEAR.data
    assert "is served as 'plain': 'fast' does not run here" in caplog.text
    assert "was tuned on another machine" in caplog.text
    packed(tmp_path / "b.bundle", {"model.onnx": LINEAR.data}, serving=changes["serving"], variants=(first,))
    with pytest.raises(Unavailable, match="'fast' needs a CPU with no-such-isa"):
        find(*define([tmp_path / "b.bundle"]), "1")


def test_a_bundle_that_was_changed_is_refused_when_it_is_found(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.bundle", {"model.onnx": LINEAR.data})
    (source,) = define([path])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError):
        find(source, "1")


def test_names_are_unique_whatever_the_form(tmp_path: Path) -> None:
    pack_model(LINEAR, tmp_path / "a.bundle", name="linear")
    with pytest.raises(AlreadyExists, match="two targets are called 'linear'"):
        define([onnx(tmp_path), tmp_path / "a.bundle"])


def test_settings_go_to_the_target_of_their_name(tmp_path: Path) -> None:
    targets = [onnx(tmp_path, "a"), onnx(tmp_path, "b")]
    a, b = define(targets, {"b": {"max_batch_size": 8}}, tmp_path)
    assert (find(a, "1").max_batch, find(b, "1").max_batch) == (DEFAULT_MAX_BATCH, 8)
    with pytest.raises(InvalidConfig, match=r"for model 'c', but no such model was passed on the command line"):
        define(targets, {"c": {"max_batch_size": 8}})


def test_sequences_need_one_process(tmp_path: Path) -> None:
    (source,) = define([onnx(tmp_path)], {"linear": {"sequence_batching": {}}})
    assert find(source, "1").given.sequence_batching is not None
    with pytest.raises(InvalidConfig, match="'sequence_batching'.*a different process"):
        find(source, "1", LoadOptions(processes=2))


def test_isolation_may_be_the_configurations(tmp_path: Path) -> None:
    (source,) = define([onnx(tmp_path)], {"linear": {"parameters": {"isolation": {"string_value": "process"}}}})
    found = find(source, "1")
    assert (found.load_options.isolation, found.has_own_threads) == ("process", True)
    wrong = msgspec.structs.replace(source, given=msgspec.structs.replace(source.given, parameters={"isolation": "x"}))
    with pytest.raises(InvalidConfig, match=r"'parameters\[isolation\]' is 'x'"):
        find(wrong, "1")
