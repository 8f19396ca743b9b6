from __future__ import annotations

import copy
import io
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import models
from bundles import FILES, MACHINE, manifest_for, packed
from penstock.artifact import Artifact, FileEntry, Format, file_entries, sha256
from penstock.bundle.manifest import (
    MANIFEST,
    MANIFEST_DIGEST,
    SCHEMA_VERSION,
    Manifest,
    Variant,
    encode,
)
from penstock.bundle.open import Bundle, is_bundle, open_bundle, open_model, peek
from penstock.bundle.pack import SEAL_SIZE, write_zip
from penstock.errors import IntegrityError, NotFound, Unavailable, Unsupported
from penstock.resources import INTEGER_DOT_PRODUCT

# One variant of three files and one of a single file of another format.
_SEVERAL = {
    "models/ir/m.xml": b"<net/>",
    "models/ir/m.bin": b"weights",
    "models/ir/deep/x": b"1",
    "models/m.tflite": b"lite",
}
_VARIANTS = (
    Variant(
        "ir",
        "models/ir/m.xml",
        "openvino",
        "fp32",
        format=Format.OPENVINO_IR,
        beside=("models/ir/m.bin", "models/ir/deep/x"),
    ),
    Variant("fp32", "models/m.tflite", "tflite", "fp32", format=Format.TFLITE),
)
_FORMS = pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])


_CONTENTS = pytest.mark.parametrize(
    "content", [{}, {"files": _SEVERAL, "variants": _VARIANTS}], ids=["one file", "several files"]
)
_PLAIN = Variant("fp32", "model.onnx", "onnxruntime", "fp32")


def _entries(manifest: Manifest, files: dict[str, bytes]) -> dict[str, bytes]:
    data = encode(manifest)
    return {MANIFEST: data, MANIFEST_DIGEST: sha256(data).encode(), **files}


def _forged(path: Path, manifest: Manifest, files: dict[str, bytes]) -> Path:
    """A one-file bundle with a valid seal around any content, as an attacker could forge it."""
    write_zip(path, _entries(manifest, files))
    return path


# Round trip


@_FORMS
def test_round_trip(folder: bool, tmp_path: Path) -> None:
    path = packed(tmp_path / "a.bundle", folder=folder)
    bundle = open_bundle(str(path))
    manifest = manifest_for(FILES)
    assert (bundle.name, bundle.path, bundle.manifest) == ("test", path, manifest)
    assert bundle.digest == sha256(encode(manifest))
    assert {name: bundle.read(name) for name in FILES} == FILES
    assert is_bundle(path)


def test_a_bundle_without_its_file_can_still_be_read(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.bundle")
    bundle = open_bundle(path)
    path.unlink()
    assert bundle.read("model.onnx") == b"model"


def test_artifact_carries_the_provenance(tmp_path: Path) -> None:
    bundle = open_bundle(packed(tmp_path / "a.bundle"))
    artifact = bundle.artifact(bundle.manifest.variants[0])
    assert (artifact.data, artifact.format, artifact.digest) == (b"model", Format.ONNX, sha256(b"model"))
    assert artifact.provenance == bundle.manifest.provenance


@_FORMS
def test_a_variant_comes_with_its_format_and_all_its_files(folder: bool, tmp_path: Path) -> None:
    bundle = open_bundle(packed(tmp_path / "a.bundle", _SEVERAL, folder=folder, variants=_VARIANTS))
    assert bundle.manifest.schema_version == 3
    ir, lite = (bundle.artifact(variant) for variant in bundle.manifest.variants)
    files = {"m.xml": b"<net/>", "m.bin": b"weights", "deep/x": b"1"}
    assert (ir.format, ir.files(), ir.path) == (Format.OPENVINO_IR, files, None)
    assert (lite.format, lite.files()) == (Format.TFLITE, {"m.tflite": b"lite"})


@_FORMS
def test_a_bundle_and_a_model_are_told_apart(folder: bool, tmp_path: Path) -> None:
    assert isinstance(open_model(packed(tmp_path / "a.bundle", folder=folder)), Bundle)
    # Whatever it is called.
    assert isinstance(open_model(str(packed(tmp_path / "b.onnx", folder=folder))), Bundle)
    (tmp_path / "m.tflite").write_bytes(b"lite")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").write_bytes(b"graph")
    for name, format in (("m.tflite", Format.TFLITE), ("saved", Format.SAVED_MODEL)):
        model = open_model(tmp_path / name)
        assert isinstance(model, Artifact)
        assert model.format is format
    with pytest.raises(NotFound, match="no bundle or model .*`penstock build`"):
        open_model(tmp_path / "none")
    for other in (Path(__file__).parent, Path("/dev/zero")):
        with pytest.raises(Unsupported, match=r"not a model file that Penstock reads \(use one of: ONNX \(\.onnx\)"):
            open_model(other)


def test_a_part_of_a_bundle_is_called_damaged(tmp_path: Path) -> None:
    whole = packed(tmp_path / "whole.bundle").read_bytes()
    for name, data in (("a.bundle", b""), ("b.bundle", b"text"), ("unnamed", whole[:-100]), ("c.zip", whole[:100])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(IntegrityError, match=f"'{name}' is not a Penstock bundle"):
            open_model(tmp_path / name)


@_FORMS
def test_peek_reads_the_manifest_alone(folder: bool, tmp_path: Path) -> None:
    manifest = peek(packed(tmp_path / "a.bundle", folder=folder, version="7"))
    assert (manifest.name, manifest.version) == ("test", "7")
    with pytest.raises(IntegrityError, match="has no manifest"):
        peek(Path(__file__).parent)
    with pytest.raises(IntegrityError, match="has no manifest"):
        peek(Path(__file__))


def test_no_such_file_in_the_bundle_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no file 'x' \(its files are \['model.onnx', 'report/index.html'\]\)"):
        open_bundle(packed(tmp_path / "a.bundle")).read("x")


def test_choose_takes_the_first_variant_that_fits_the_cpu(tmp_path: Path) -> None:
    variants = tuple(
        Variant(name, "model.onnx", "onnxruntime", name, requires=requires)
        for name, requires in (("amx", ("amx_int8",)), ("int8", ("avx512_vnni",)), ("avx", ("avx2",)))
    )
    serving = msgspec.structs.replace(manifest_for(FILES).serving, variant="int8")
    bundle = open_bundle(packed(tmp_path / "a.bundle", variants=variants, serving=serving))
    assert bundle.choose(MACHINE).name == "int8"
    assert bundle.choose(msgspec.structs.replace(MACHINE, isa=("avx2",))).name == "avx"
    with pytest.raises(
        Unavailable, match="no variant of bundle 'test' runs here: .*'int8' needs a CPU with avx512_vnni"
    ):
        bundle.choose(msgspec.structs.replace(MACHINE, isa=()))


def test_choose_takes_any_integer_dot_product_for_another(tmp_path: Path) -> None:
    variants = (
        Variant("int8", "model.onnx", "onnxruntime", "int8", requires=(INTEGER_DOT_PRODUCT,)),
        Variant("fp32", "model.onnx", "onnxruntime", "fp32"),
    )
    bundle = open_bundle(packed(tmp_path / "a.bundle", variants=variants))
    for isa, chosen in (("amx_int8", "int8"), ("avx512_vnni", "int8"), ("asimddp", "int8"), ("avx2", "fp32")):
        assert bundle.choose(msgspec.structs.replace(MACHINE, isa=(isa,))).name == chosen


def test_choose_passes_over_engines_that_are_not_installed(tmp_path: Path) -> None:
    variants = tuple(Variant(name, "model.onnx", name, "fp32") for name in ("openvino", "fp32"))
    bundle = open_bundle(packed(tmp_path / "a.bundle", variants=variants))
    assert bundle.choose(MACHINE).engine == "openvino"
    assert bundle.choose(MACHINE, lambda engine: engine != "openvino").engine == "fp32"
    with pytest.raises(Unavailable, match="needs engine 'openvino', which is not installed"):
        bundle.choose(MACHINE, lambda _: False)


def test_differences_from_the_machine_measured_on(tmp_path: Path) -> None:
    bundle = open_bundle(packed(tmp_path / "a.bundle"))
    assert bundle.differences(MACHINE) == []
    assert bundle.differences(msgspec.structs.replace(MACHINE, cores=4)) == ["cores: measured on 2, here 4"]


# Accidents: everything that is not exactly what was packed


@_CONTENTS
def test_every_flipped_byte_of_a_file_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    path = packed(tmp_path / "a.bundle", **content)
    intact = path.read_bytes()
    for position in range(len(intact)):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError):
            open_bundle(path)
    path.write_bytes(intact)
    open_bundle(path)


@_CONTENTS
def test_flipped_bytes_of_every_file_of_a_folder_are_refused(content: dict[str, Any], tmp_path: Path) -> None:
    folder = packed(tmp_path / "a.bundle", folder=True, **content)
    for file in (file for file in folder.rglob("*") if file.is_file()):
        intact = file.read_bytes()
        for position in range(0, len(intact), 1 + len(intact) // 100):
            damaged = bytearray(intact)
            damaged[position] ^= 1 << position % 8
            file.write_bytes(damaged)
            with pytest.raises(IntegrityError):
                open_bundle(folder)
        file.write_bytes(intact)
    open_bundle(folder)


def test_truncations_and_tails_are_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.bundle")
    intact = path.read_bytes()
    for length in [*range(0, len(intact), 7), len(intact) - 1]:
        path.write_bytes(intact[:length])
        with pytest.raises(IntegrityError):
            open_bundle(path)
    for tail in (b"\0", b"\n", intact):
        path.write_bytes(intact + tail)
        with pytest.raises(IntegrityError):
            open_bundle(path)


@_CONTENTS
def test_every_flipped_byte_under_a_renewed_seal_is_refused_or_harmless(
    content: dict[str, Any], tmp_path: Path
) -> None:
    path = packed(tmp_path / "a.bundle", **content)
    unsealed = path.read_bytes()[:-SEAL_SIZE]
    digest = open_bundle(path).digest
    for position in range(len(unsealed)):
        forged = bytearray(unsealed)
        forged[position] ^= 1 << position % 8
        path.write_bytes(bytes(forged) + sha256(bytes(forged)).encode())
        try:
            bundle = open_bundle(path)
        except IntegrityError:
            continue
        assert bundle.digest == digest, position  # e.g. a time stamp
        for entry in bundle.manifest.files:
            assert sha256(bundle.read(entry.path)) == entry.sha256, position


def _remove(folder: Path) -> None:
    (folder / "model.onnx").unlink()


def _add(folder: Path) -> None:
    (folder / "report" / "extra").write_bytes(b"")


def _rename(folder: Path) -> None:
    (folder / "model.onnx").rename(folder / "model2.onnx")


def _swap(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(FILES["report/index.html"])


def _cut(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"mode")


def _link(folder: Path) -> None:
    # The content is right, and the link is refused all the same.
    (folder / "model.onnx").rename(folder.parent / "outside.onnx")
    (folder / "model.onnx").symlink_to(folder.parent / "outside.onnx")


def _link_folder(folder: Path) -> None:
    (folder / "report").rename(folder.parent / "outside")
    (folder / "report").symlink_to(folder.parent / "outside")


def _unsign(folder: Path) -> None:
    (folder / MANIFEST_DIGEST).unlink()


def _unlist(folder: Path) -> None:
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_remove, r"lacks \['model.onnx'\] \(copy it again\)"),
        (_add, r"does not list: \['report/extra'\]"),
        (_rename, "lacks"),
        (_swap, "model.onnx does not match its digest"),
        (_cut, "model.onnx does not match its digest"),
        (_link, "'model.onnx' .* is a link"),
        (_link_folder, "'report' .* is a link"),
        (_unsign, "has no manifest"),
        (_unlist, "has no manifest"),
    ],
)
def test_a_folder_that_is_not_what_was_packed(change: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = packed(tmp_path / "a.bundle", folder=True)
    change(folder)
    with pytest.raises(IntegrityError, match=message):
        open_bundle(folder)


def test_what_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no bundle .*`penstock build`"):
        open_bundle(tmp_path / "none")
    (tmp_path / "text").write_text("not a bundle")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    for name in ("text", "empty", "folder"):
        assert not is_bundle(tmp_path / name)
        with pytest.raises(IntegrityError, match=f"'{name}' .*not a Penstock bundle"):
            open_bundle(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as archive:
        archive.writestr("readme", "a zip, but no bundle")
    with pytest.raises(IntegrityError):
        open_bundle(tmp_path / "plain.zip")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_bundle_that_may_not_be_read(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.bundle")
    path.chmod(0)
    with pytest.raises(IntegrityError, match="cannot read bundle"):
        open_bundle(path)


# Forgeries: the seal is right, what is under it is not


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "..\\x", "C:\\x", "a//b", "./a"])
def test_an_entry_that_leaves_the_bundle(name: str, tmp_path: Path) -> None:
    files = {**FILES, name: b"x"}
    with pytest.raises(IntegrityError, match="is outside the bundle"):
        open_bundle(_forged(tmp_path / "a.bundle", manifest_for(files), files))


@pytest.mark.parametrize(
    "names",
    [
        ("a", "A"),
        ("models/w", "Models/w"),
        ("Models/a", "models/b"),
        ("a", "a/b"),
        ("MANIFEST.json",),
        ("manifest.json/a",),
        ("straße", "STRASSE"),
        ("\u00e9", "e\u0301"),
    ],
    ids=" and ".join,
)
def test_names_that_some_file_systems_take_for_one_another(names: tuple[str, ...], tmp_path: Path) -> None:
    files = {**FILES, **dict.fromkeys(names, b"x")}
    with pytest.raises(IntegrityError, match="twice, or under names that differ only in case"):
        open_bundle(_forged(tmp_path / "a.bundle", manifest_for(files), files))


def test_a_link_in_an_archive(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in _entries(manifest_for(FILES), FILES).items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o120777 if name == "model.onnx" else 0o100644) << 16
            archive.writestr(info, data)
        archive.comment = b"0" * SEAL_SIZE
    (tmp_path / "a.bundle").write_bytes(_seal(buffer))
    with pytest.raises(IntegrityError, match=r"'model\.onnx' .* is a link"):
        open_bundle(tmp_path / "a.bundle")


@pytest.mark.parametrize(
    "changes",
    [{"variants": (replace(_PLAIN, format=Format.TFLITE),)}, {"variants": (replace(_PLAIN, beside=("w",)),)}],
    ids=["format", "files"],
)
def test_an_older_schema_with_newer_content_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    files = {**FILES, "w": b"weights"}
    data = encode(manifest_for(files, **changes)).replace(b'"schema_version":3', b'"schema_version":2')
    entries = {MANIFEST: data, MANIFEST_DIGEST: sha256(data).encode(), **files}
    write_zip(tmp_path / "a.bundle", entries)
    with pytest.raises(IntegrityError, match="schema version 2, but its content needs version 3"):
        open_bundle(tmp_path / "a.bundle")


def test_a_manifest_that_names_a_file_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    folder = packed(tmp_path / "a.bundle", folder=True)
    outside = FileEntry("../secret", 6, sha256(b"secret"))
    forged = encode(msgspec.structs.replace(manifest_for(FILES), files=(*file_entries(FILES), outside)))
    (folder / MANIFEST).write_bytes(forged)
    (folder / MANIFEST_DIGEST).write_text(sha256(forged))
    with pytest.raises(IntegrityError, match=r"'\.\./secret' is outside the bundle"):
        open_bundle(folder)


def test_a_newer_schema(tmp_path: Path) -> None:
    path = _forged(tmp_path / "a.bundle", manifest_for(FILES, schema_version=SCHEMA_VERSION + 1), FILES)
    with pytest.raises(Unsupported, match=rf"schema version {SCHEMA_VERSION + 1}.*upgrade"):
        open_bundle(path)


@pytest.mark.parametrize(
    ("changes", "files", "message"),
    [
        ({}, {"model.onnx": b"model"}, r"lacks \['report/index.html'\]"),
        ({}, {**FILES, "extra": b""}, "does not list"),
        ({}, {**FILES, "model.onnx": b"MODEL"}, "model.onnx does not match its digest"),
        ({"variants": ()}, FILES, "serves a variant that it does not contain"),
        (
            {"variants": (Variant("fp32", "gone.onnx", "e", "fp32"),)},
            FILES,
            "'fp32' .* lists a missing file",
        ),
        (
            {"variants": (Variant("int8", "model.onnx", "e", "int8"),)},
            FILES,
            "serves a variant that it does not contain",
        ),
        ({"variants": (_PLAIN, _PLAIN)}, FILES, "two variants of bundle 'test' have the same name"),
        (
            {"variants": (replace(_PLAIN, beside=("gone",)),)},
            FILES,
            "'fp32' .* lists a missing file",
        ),
        ({"variants": (replace(_PLAIN, beside=("model.onnx",)),)}, FILES, "'fp32' .* has files outside its folder"),
        (
            {"variants": (replace(_PLAIN, file="report/index.html", beside=("model.onnx",)),)},
            FILES,
            "'fp32' .* has files outside its folder",
        ),
        ({"variants": (replace(_PLAIN, format=Format.PYTHON),)}, FILES, "'fp32' .* is Python code"),
        (
            {"variants": (replace(_PLAIN, coding="coded", beside=("report/index.html",)),)},
            FILES,
            "'fp32' .* is coded, but not one ONNX file",
        ),
        ({"version": "1.0"}, FILES, "version of bundle 'test' is '1.0'"),
        ({"version": "0"}, FILES, "version of bundle 'test' is '0'"),
    ],
)
def test_a_manifest_that_contradicts_the_files(
    changes: dict[str, object], files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    with pytest.raises(IntegrityError, match=message):
        open_bundle(_forged(tmp_path / "a.bundle", manifest_for(FILES, **changes), files))


def _seal(archive: io.BytesIO) -> bytes:
    unsealed = archive.getvalue()[:-SEAL_SIZE]
    return unsealed + sha256(unsealed).encode()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_twice(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in [*_entries(manifest_for(FILES), FILES).items(), ("model.onnx", b"other")]:
            archive.writestr(name, data)
        archive.comment = b"0" * SEAL_SIZE
    (tmp_path / "a.bundle").write_bytes(_seal(buffer))
    with pytest.raises(IntegrityError, match="contains 'model.onnx' twice"):
        open_bundle(tmp_path / "a.bundle")


def test_a_bomb_is_refused_unread(tmp_path: Path) -> None:
    files = {**FILES, "bomb": bytes(10 << 20)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in _entries(manifest_for(files), files).items():
            archive.writestr(name, data)
        archive.comment = b"0" * SEAL_SIZE
    (tmp_path / "a.bundle").write_bytes(_seal(buffer))
    with pytest.raises(IntegrityError, match="is compressed, but bundles contain uncompressed entries"):
        open_bundle(tmp_path / "a.bundle")


def test_entries_that_share_bytes_are_refused_unread(tmp_path: Path) -> None:
    # The directory names the same stored bytes 200 times; each entry alone is smaller than the file.
    body = bytes(1 << 20)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in _entries(manifest_for(FILES), FILES).items():
            archive.writestr(name, data)
        archive.writestr("bomb-000", body)
        (whole,) = (info for info in archive.infolist() if info.filename == "bomb-000")
        for number in range(1, 200):
            info = copy.copy(whole)
            info.filename = info.orig_filename = f"bomb-{number:03}"
            archive.filelist.append(info)
        archive.comment = b"0" * SEAL_SIZE
    (tmp_path / "a.bundle").write_bytes(_seal(buffer))
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="overlap: together they are larger than the file"):
            open_bundle(tmp_path / "a.bundle")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("extra", 1 << 30, "does not list"),
        ("model.onnx", 1 << 30, "model.onnx does not match its digest"),
        (MANIFEST, 1 << 30, "manifest .* is larger than"),
        (MANIFEST_DIGEST, 1 << 30, "manifest.json does not match its digest"),
    ],
)
def test_a_folder_is_measured_before_it_is_read(name: str, size: int, message: str, tmp_path: Path) -> None:
    folder = packed(tmp_path / "a.bundle", folder=True)
    with (folder / name).open("ab") as file:
        file.truncate(size)  # sparse: takes no disk
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match=message):
            open_bundle(folder)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_pipe_in_a_folder_is_refused_unread(tmp_path: Path) -> None:
    folder = packed(tmp_path / "a.bundle", folder=True)
    os.mkfifo(folder / "pipe")
    with pytest.raises(IntegrityError, match="'pipe' .* is neither a file nor a folder"):
        open_bundle(folder)


def test_a_pipe_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert not is_bundle(path)
        with pytest.raises(IntegrityError, match="neither a file nor a folder"):
            open_bundle(path)


def test_what_never_was_a_bundle_is_not_called_a_changed_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones(3))
    with pytest.raises(IntegrityError, match=r"'x\.npz' is not a Penstock bundle: it has no manifest"):
        open_bundle(tmp_path / "x.npz")
    (tmp_path / "model.onnx").write_bytes(models.linear(3, 2).data)
    with pytest.raises(IntegrityError, match=r"is a model file \(ONNX\), not a .*`penstock build`"):
        open_bundle(tmp_path / "model.onnx")


def test_a_manifest_that_lists_a_file_twice(tmp_path: Path) -> None:
    entries = file_entries(FILES)
    twice = msgspec.structs.replace(manifest_for(FILES), files=(*entries, entries[0]))
    with pytest.raises(IntegrityError, match="contains 'model.onnx' twice"):
        open_bundle(_forged(tmp_path / "a.bundle", twice, FILES))
