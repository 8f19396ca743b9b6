from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import models
from benchmarks.zoo.caffe import MODELS
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, NotFound, ResourceExhausted
from penstock.offline.convert import cached
from penstock.offline.convert.cached import onnx_file, read_model
from penstock.offline.convert.certificate import attach, certificate_of
from penstock.offline.convert.convert import convert


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "converted"


@pytest.fixture
def network(tmp_path: Path) -> Path:
    given = MODELS["old_lenet"].make(tmp_path)
    assert isinstance(given, Path)
    return given


def test_an_onnx_file_is_read_as_it_is(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "linear.onnx"
    path.write_bytes(models.linear(3, 2).data)
    assert onnx_file(path) == path
    assert read_model(path).provenance == ()
    assert read_model(artifact := models.linear(3, 2)) is artifact
    assert not cache.exists()


def test_the_certificate_becomes_provenance(tmp_path: Path) -> None:
    (tmp_path / "linear.onnx").write_bytes(models.linear(3, 2).data)
    convert(tmp_path / "linear.onnx", tmp_path / "out.onnx")
    (step,) = read_model(tmp_path / "out.onnx").provenance
    assert (step.name, step.facts["certificate"]["holds"]) == ("convert", True)


def test_a_source_is_converted_once(network: Path, cache: Path) -> None:
    stages: list[str] = []
    first = onnx_file(network, lambda stage, *_: stages.append(stage))
    assert first.is_relative_to(cache)
    assert first.stem == network.stem
    assert "export" in stages
    stages.clear()
    assert onnx_file(network, lambda stage, *_: stages.append(stage)) == first
    assert stages == []


def test_other_weights_or_versions_are_another_source(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = onnx_file(network)
    monkeypatch.setattr(cached, "__version__", "another")
    second = onnx_file(network)
    assert second != first
    weights = network.with_suffix(".caffemodel")
    weights.write_bytes(weights.read_bytes() + b"\x0a\x03new")
    assert onnx_file(network) not in (first, second)


def test_a_damaged_result_is_made_again(network: Path) -> None:
    kept = onnx_file(network)
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    assert onnx_file(network) == kept
    assert Artifact.from_file(kept).data == whole


@pytest.mark.parametrize("change", [{"holds": False}, {"source_digest": "another"}])
def test_a_result_without_a_certificate_for_the_source_is_made_again(network: Path, change: dict[str, Any]) -> None:
    kept = onnx_file(network)
    whole = kept.read_bytes()
    artifact = Artifact.from_file(kept)
    certificate = certificate_of(artifact)
    assert certificate is not None
    kept.write_bytes(attach(artifact, msgspec.structs.replace(certificate, **change)).data)
    assert onnx_file(network) == kept
    assert kept.read_bytes() == whole


@pytest.mark.parametrize(
    "package", ["numpy", "scikit-learn", "keras", "jax", "flax", "skops", "xgboost", "transformers"]
)
def test_the_packages_of_all_frameworks_are_in_the_key(package: str) -> None:
    assert package in cached._PACKAGES


def test_errors_are_those_of_a_conversion(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no model"):
        onnx_file(tmp_path / "absent.keras")
    with pytest.raises(InvalidArgument, match="cannot load the model 'no_module:f'"):
        onnx_file("no_module:f")


def test_an_unwritable_cache(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ResourceExhausted, match="the cache folder .* cannot be made") as raised:
        onnx_file(network)
    assert "XDG_CACHE_HOME" in raised.value.hint


@pytest.mark.parametrize(
    ("hint", "command"),
    [
        ("add --trust-pickle if you trust it", "--trust-pickle"),
        ('add --inputs "x:float32[N,4]" --inputs "mask:bool[N]"', '--inputs "x:float32[N,4]" --inputs "mask:bool[N]"'),
        ("declare all with --inputs, or give all as --sample", "--inputs DECLARATION"),
        ("free it with --dynamic x:0=batch, or leave it", "--dynamic x:0=batch"),
        ("try another --opset or a newer exporter", "--opset VERSION"),
    ],
)
def test_hints_name_the_command_that_has_their_options(
    hint: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise InvalidArgument("no", hint)

    monkeypatch.setattr(cached, "resolve", refuse)
    with pytest.raises(InvalidArgument) as raised:
        onnx_file("a folder/net.pth")
    assert (
        raised.value.hint
        == f"run `penstock convert 'a folder/net.pth' {command} -o net.onnx` first, and give net.onnx; {hint}"
    )


@pytest.mark.parametrize(
    "hint", ["check the path", "penstock convert package.module:f --weights x.pt", "use --threads 2"]
)
def test_other_hints_stay_as_they_are(hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise InvalidArgument("no", hint)

    monkeypatch.setattr(cached, "resolve", refuse)
    with pytest.raises(InvalidArgument) as raised:
        onnx_file("net.pth")
    assert raised.value.hint == hint
