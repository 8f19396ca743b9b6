from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bundles import FILES, manifest_for, packed
from penstock.bundle.manifest import MANIFEST, MANIFEST_DIGEST
from penstock.bundle.open import is_bundle, open_bundle
from penstock.bundle.pack import pack
from penstock.errors import AlreadyExists, IntegrityError, PenstockError, ResourceExhausted

_TESTS = str(Path(__file__).parent.parent)


def _tree(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())


def test_same_content_gives_same_bytes_wherever_and_in_whatever_order(tmp_path: Path) -> None:
    one = packed(tmp_path / "one.bundle", FILES)
    other = packed(tmp_path / "other.bundle", dict(reversed(FILES.items())))
    assert one.read_bytes() == other.read_bytes()
    assert packed(tmp_path / "third.bundle", {**FILES, "model.onnx": b"Model"}).read_bytes() != one.read_bytes()


def test_both_forms_hold_the_same_files(tmp_path: Path) -> None:
    folder = packed(tmp_path / "folder", folder=True)
    with zipfile.ZipFile(packed(tmp_path / "file")) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[:2] == [MANIFEST, MANIFEST_DIGEST]
        assert {name: archive.read(name) for name in sorted(archive.namelist())} == {
            name: (folder / name).read_bytes() for name in _tree(folder)
        }


def test_nothing_else_is_left_beside_it(tmp_path: Path) -> None:
    packed(tmp_path / "deep" / "down" / "a.bundle")
    packed(tmp_path / "b.bundle", folder=True)
    assert {path.name for path in tmp_path.rglob("*.*") if "partial" in path.name} == set()


# What may be packed


@pytest.mark.parametrize(
    "files", [{}, {"model.onnx": b"other"}, {"model.onnx": b"model", "extra": b""}, {"renamed.onnx": b"model"}], ids=str
)
def test_files_must_be_those_of_the_manifest(files: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="does not list the files"):
        pack(manifest_for({"model.onnx": b"model"}), files, tmp_path / "a.bundle")
    assert _tree(tmp_path) == []


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "a\\b", "a//b", "./a", "", ".", "a/"])
@pytest.mark.parametrize("folder", [False, True])
def test_paths_that_leave_the_bundle(path: str, folder: bool, tmp_path: Path) -> None:
    files = {**FILES, path: b"x"}
    with pytest.raises(IntegrityError, match="is outside the bundle"):
        pack(manifest_for(files), files, tmp_path / "inner" / "a.bundle", folder=folder)
    assert _tree(tmp_path) == []


@pytest.mark.parametrize("name", [MANIFEST, MANIFEST_DIGEST])
def test_no_file_takes_the_manifests_place(name: str, tmp_path: Path) -> None:
    with pytest.raises(PenstockError):
        packed(tmp_path / "a.bundle", {**FILES, name: b"{}"})
    assert _tree(tmp_path) == []


# Overwriting


@pytest.mark.parametrize("old_folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("new_folder", [False, True], ids=["by-file", "by-folder"])
def test_overwrite(old_folder: bool, new_folder: bool, tmp_path: Path) -> None:
    target = packed(tmp_path / "a.bundle", {**FILES, "only-in-old": b"1"}, folder=old_folder)
    old = open_bundle(target).digest
    with pytest.raises(AlreadyExists, match="exists.*allow overwriting"):
        packed(target, folder=new_folder)
    assert open_bundle(target).digest == old
    pack(manifest_for(FILES), FILES, target, overwrite=True, folder=new_folder)
    assert target.is_dir() is new_folder
    assert open_bundle(target).digest != old
    assert [path.name for path in tmp_path.iterdir()] == ["a.bundle"]


def test_overwriting_never_removes_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("a year's work")
    for folder in (False, True):
        with pytest.raises(AlreadyExists, match="is a folder that is not a bundle"):
            pack(manifest_for(FILES), FILES, tmp_path / "thesis", overwrite=True, folder=folder)
    assert _tree(tmp_path) == ["thesis/chapter1"]
    (tmp_path / "empty").mkdir()
    pack(manifest_for(FILES), FILES, tmp_path / "empty", overwrite=True)
    assert open_bundle(tmp_path / "empty").name == "test"


@pytest.mark.parametrize("name", ["notes.txt", "report/mine.html"])
@pytest.mark.parametrize("folder", [False, True], ids=["by-file", "by-folder"])
def test_overwriting_never_removes_a_file_beside_the_bundles_own(name: str, folder: bool, tmp_path: Path) -> None:
    target = packed(tmp_path / "a.bundle", folder=True)
    (target / name).write_text("a year's work")
    with pytest.raises(AlreadyExists, match=f"contains '{name}'"):
        pack(manifest_for(FILES), FILES, target, overwrite=True, folder=folder)
    assert (target / name).read_text() == "a year's work"


def test_overwriting_takes_no_other_manifest_for_a_bundles(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"name": "a web page"}')
    with pytest.raises(AlreadyExists, match="is a folder that is not a bundle"):
        pack(manifest_for(FILES), FILES, tmp_path, overwrite=True, folder=True)
    assert _tree(tmp_path) == [MANIFEST]


# Half-way failures


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("existing", [False, True], ids=["new", "over-old"])
def test_a_disk_that_fills_up_leaves_what_was_there(folder: bool, existing: bool, tmp_path: Path) -> None:
    target = tmp_path / "a.bundle"
    if existing:
        packed(target, folder=folder)
    before = _tree(tmp_path)
    # The limit on file size makes the kernel refuse the write half-way, as a full disk does.
    script = f"""
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {_TESTS!r})
from bundles import manifest_for
from penstock.bundle.pack import pack
from penstock.errors import ResourceExhausted
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
files = {{"a": b"1", "model.onnx": bytes(200_000)}}
try:
    pack(manifest_for(files), files, Path({str(target)!r}), overwrite=True, folder={folder})
except ResourceExhausted as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "cannot write" in done.stdout
    assert "free some space" in done.stdout
    assert _tree(tmp_path) == before
    if existing:
        assert open_bundle(target).name == "test"


def _killed(where: str, target: Path, folder: bool) -> None:
    """A process that overwrites ``target`` and kills itself when ``where``, Python code, calls ``die``."""
    script = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {_TESTS!r})
from bundles import FILES, manifest_for
from penstock.bundle import pack
from penstock.storage import atomic
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{where}
pack.pack(manifest_for(FILES), FILES, Path({str(target)!r}), overwrite=True, folder={folder})
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_kill_leaves_no_half_bundle_but_a_folder_that_tells_its_name(folder: bool, tmp_path: Path) -> None:
    target = tmp_path / "a.bundle"
    _killed("os.fsync = die", target, folder)
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"a\.bundle\.\w+\.partial", left.name)
    assert not is_bundle(left)
    packed(target, folder=folder)
    assert {path.name for path in tmp_path.iterdir()} == {"a.bundle", left.name}
    assert open_bundle(target).name == "test"


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_kill_around_the_renaming_leaves_the_old_bundle_or_the_new_one(folder: bool, tmp_path: Path) -> None:
    old, new = (
        packed(tmp_path / name, files, folder=folder) for name, files in (("o", {"model.onnx": b"old"}), ("n", FILES))
    )
    before, after = open_bundle(old).digest, open_bundle(new).digest
    _killed("atomic._replace = die", old, folder)
    assert open_bundle(old).digest == before
    _killed("replace = atomic._replace; atomic._replace = lambda *names: (replace(*names), die())", old, folder)
    assert open_bundle(old).digest == after


def test_without_an_atomic_swap_a_kill_between_the_renamings_loses_nothing(tmp_path: Path) -> None:
    target = packed(tmp_path / "a.bundle", {"model.onnx": b"old"}, folder=True)
    before = open_bundle(target).digest
    rename = "rename = Path.rename; Path.rename = lambda *names: (rename(*names), die())"
    _killed(f"atomic._exchange = lambda *_: False; {rename}", target, folder=True)
    (left,) = tmp_path.iterdir()
    assert open_bundle(left / "old").digest == before
    assert open_bundle(left / "new").read("model.onnx") == FILES["model.onnx"]


def test_folders_are_replaced_where_no_atomic_swap_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.atomic._RENAME_EXCHANGE", 1 << 30)  # the kernel knows no such flag
    target = packed(tmp_path / "a.bundle", {"model.onnx": b"old"}, folder=True)
    pack(manifest_for(FILES), FILES, target, overwrite=True, folder=True)
    assert open_bundle(target).read("model.onnx") == FILES["model.onnx"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.bundle"]


def test_builds_to_one_target_do_not_meet(tmp_path: Path) -> None:
    target = tmp_path / "a.bundle"
    contents = [{"model.onnx": bytes([number]) * 100_000} for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for done in [
            pool.submit(pack, manifest_for(files), files, target, overwrite=True)
            for files in contents
            for _ in range(5)
        ]:
            done.result()
    assert open_bundle(target).read("model.onnx") in [files["model.onnx"] for files in contents]
    assert [path.name for path in tmp_path.iterdir()] == ["a.bundle"]


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EROFS, "choose a place that you may write to"),
        (errno.EACCES, "choose a place that you may write to"),
        (errno.EIO, "choose another place"),
    ],
)
def test_the_hint_follows_the_cause(number: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ResourceExhausted) as caught:
        packed(tmp_path / "a.bundle")
    assert caught.value.hint.startswith(hint)
    assert os.strerror(number) in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_target_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceExhausted, match="cannot write.*choose another place"):
        packed(tmp_path / "file" / "a.bundle")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_target_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ResourceExhausted, match="cannot write"):
        packed(tmp_path / "a.bundle")


def test_a_moved_bundle_is_the_same_bundle(tmp_path: Path) -> None:
    target = packed(tmp_path / "a.bundle", folder=True)
    digest = open_bundle(target).digest
    shutil.move(target, tmp_path / "b.bundle")
    assert open_bundle(tmp_path / "b.bundle").digest == digest
