from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundles import manifest_for
from evidences import accuracy, evidence, record
from penstock.bundle.manifest import (
    SCHEMA_VERSION,
    PipelineManifest,
    check_name,
    check_paths,
    check_version,
    decode,
    encode,
)
from penstock.errors import IntegrityError, InvalidArgument, InvalidConfig, Unsupported

_MANIFEST = manifest_for({"model.onnx": b"model"})


def test_round_trip() -> None:
    assert decode(encode(_MANIFEST)) == _MANIFEST


def test_canonical_form_is_sorted_and_tight() -> None:
    data = encode(_MANIFEST)
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    shuffled = msgspec.structs.replace(_MANIFEST, tools={"b": "1", "a": "2"})
    assert encode(shuffled) == encode(msgspec.structs.replace(_MANIFEST, tools={"a": "2", "b": "1"}))


def test_newer_schema_is_refused_with_what_to_do() -> None:
    newer = encode(msgspec.structs.replace(_MANIFEST, schema_version=SCHEMA_VERSION + 1))
    with pytest.raises(Unsupported, match=rf"schema version {SCHEMA_VERSION + 1}.*up to {SCHEMA_VERSION}.*upgrade"):
        decode(newer)
    # Whatever else the newer schema changed.
    with pytest.raises(Unsupported):
        decode(b'{"schema_version": 99, "name": 5}')


def test_unknown_fields_of_the_same_schema_are_passed_over() -> None:
    data = json.dumps({**json.loads(encode(_MANIFEST)), "remark": "added by a later minor version"}).encode()
    assert decode(data) == _MANIFEST


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"schema_version": 1}',
        b'{"schema_version": "1"}',
        b"\xff",
        b"[" * 100_000,
        b'{"schema_version": 1, "remark": ' + b"[" * 100_000,
    ],
    ids=lambda data: data[:24].decode("latin-1"),
)
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="manifest cannot be read"):
        decode(data)


@given(st.data())
def test_damaged_manifests_never_escape_the_error_tree(data: st.DataObject) -> None:
    damaged = bytearray(encode(_MANIFEST))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(IntegrityError, Unsupported):
        decode(bytes(damaged))


def test_variant_by_name() -> None:
    assert _MANIFEST.variant("fp32").file == "model.onnx"
    with pytest.raises(InvalidArgument, match=r"bundle 'test' has no variant 'int4' \(its variants are \['fp32'\]\)"):
        _MANIFEST.variant("int4")


def test_a_pipeline_needs_a_new_schema_version() -> None:
    manifest = PipelineManifest(name="p", machine=_MANIFEST.machine, files=())
    assert decode(encode(manifest)) == manifest
    assert manifest.schema_version == 5
    forged = encode(manifest).replace(b'"schema_version":5', b'"schema_version":4')
    with pytest.raises(IntegrityError, match="schema version 4, but a pipeline needs version 5"):
        decode(forged)


def test_a_pipeline_lists_what_it_names() -> None:
    manifest = PipelineManifest(name="p", machine=_MANIFEST.machine, files=())
    with pytest.raises(IntegrityError, match="names a file that it does not list: pipeline.json"):
        manifest.check()


@pytest.mark.parametrize(("field", "least"), [("threads", 0), ("instances", 1), ("max_batch", 1)])
def test_counts_of_the_serving_settings_have_a_minimum(field: str, least: int) -> None:
    allowed = msgspec.structs.replace(_MANIFEST.serving, **{field: least})
    assert decode(encode(msgspec.structs.replace(_MANIFEST, serving=allowed))).serving == allowed
    serving = msgspec.structs.replace(_MANIFEST.serving, **{field: least - 1})
    with pytest.raises(IntegrityError, match=rf"Expected `int` >= {least} - at `\$\.serving\.{field}`"):
        decode(encode(msgspec.structs.replace(_MANIFEST, serving=serving)))


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "../m", "a/b", "a\\b", "m\n", "\0", ".m", "m\udcff", "x" * 256], ids=ascii
)
def test_names_are_those_that_a_server_accepts(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a valid model name"):
        check_name(name)


@pytest.mark.parametrize("version", ["0", "", "1.0", "-1", "01", "latest", "9" * 19])
def test_versions_are_whole_numbers(version: str) -> None:
    with pytest.raises(InvalidConfig, match="is not a model version"):
        check_version(version)
    with pytest.raises(IntegrityError, match="is not a whole number"):
        msgspec.structs.replace(_MANIFEST, version=version).check()


@given(st.lists(st.text(max_size=8), max_size=6))
def test_accepted_paths_stay_apart_and_inside(paths: list[str]) -> None:
    with contextlib.suppress(IntegrityError):
        check_paths(paths)
        root = Path("/root")
        places = [Path(os.path.normpath(root / path)) for path in paths]
        assert all(place != root and place.is_relative_to(root) for place in places)
        assert len({str(place).casefold() for place in places}) == len(paths)
        assert not any(one != other and one.is_relative_to(other) for one in places for other in places)


def test_a_metric_that_older_versions_do_not_know_needs_a_newer_schema() -> None:
    for metric, version in (("top-1", 1), ("fidelity", 1), ("cosine", 4)):
        found = evidence(record("int8", 0.5, accuracy=accuracy(metric=metric)))
        manifest = decode(encode(msgspec.structs.replace(_MANIFEST, evidence=found)))
        assert manifest.schema_version == version
        assert manifest.evidence == found
