from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import AlreadyExists, InvalidArgument, ResourceExhausted
from penstock.storage.atomic import check_writable, replacing, whole_file, write_durable_folder, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_parts_are_written_one_after_the_other_and_folders_are_made(tmp_path: Path) -> None:
    write_whole(tmp_path / "a" / "b" / "file", b"one", b"two", durable=True)
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"onetwo"
    assert names(tmp_path / "a" / "b") == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    write_whole(tmp_path / "file", b"old")
    with pytest.raises(error), whole_file(tmp_path / "file") as file:  # noqa: PT012 - the block is what is tested
        file.write(b"half")
        raise error
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_replaced_file_passes_its_permissions_on(tmp_path: Path) -> None:
    for mode in (0o600, 0o664, 0o755):
        (tmp_path / "file").touch()
        (tmp_path / "file").chmod(mode)
        write_whole(tmp_path / "file", b"new")
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_new_file_has_the_usual_permissions_or_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_whole(tmp_path / "new", b"")
    write_whole(tmp_path / "private", b"", private=True)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes["new"] == modes["usual"]
    assert modes["private"] == 0o600


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        ("folder", "it is a folder"),
        ("pipe", "it is not a regular file"),
        ("file/x", "Not a directory"),
    ):
        with pytest.raises(
            ResourceExhausted, match=rf"cannot write a chart '.*{path}': {reason} \(choose another place or name\)"
        ):
            write_whole(tmp_path / path, b"", what="a chart")
    assert names(tmp_path) == ["file", "folder", "pipe"]


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ResourceExhausted, match="it is not a regular file"), replacing(tmp_path / "pipe") as new:
        new.write_bytes(b"data")
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["pipe"]


def test_a_long_name_is_written_and_one_too_long_is_refused(tmp_path: Path) -> None:
    write_whole(tmp_path / ("é" * 127), b"data")
    with pytest.raises(ResourceExhausted, match="choose a shorter name"):
        write_whole(tmp_path / ("a" * 256), b"data")
    assert names(tmp_path) == ["é" * 127]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
from penstock.errors import ResourceExhausted
from penstock.storage.atomic import write_whole
write_whole(Path("file"), b"old")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole(Path("file"), bytes(5000))
except ResourceExhausted as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "cannot write 'file': File too large (free some space or choose another place)\n"
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ResourceExhausted, match=r"Permission denied \(choose a place that you may write to\)"):
        write_whole(tmp_path / "closed" / "file", b"")


def test_a_folder_replaces_a_file_and_a_file_a_folder(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"file")
    with replacing(target) as new:
        write_durable_folder(new, {"a/b": b"1", "c": b"2"})
    assert (target / "a" / "b").read_bytes() == b"1"
    with replacing(target) as new:
        new.write_bytes(b"file")
    assert target.read_bytes() == b"file"
    assert names(tmp_path) == ["target"]


def test_nothing_is_replaced_unless_it_may_be(tmp_path: Path) -> None:
    for target in (tmp_path / "file", tmp_path / "folder" / "in"):
        write_whole(target, b"old")
    for name in ("file", "folder"):
        with pytest.raises(AlreadyExists, match=f"'{name}' exists"), replacing(tmp_path / name, overwrite=False) as new:
            write_durable_folder(new, {"in": b"new"})
    assert (tmp_path / "file").read_bytes() == (tmp_path / "folder" / "in").read_bytes() == b"old"
    assert names(tmp_path) == ["file", "folder"]


@pytest.mark.parametrize("place", ["folder", "pipe", "file/x", "a" * 256, "/proc/x"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match="cannot be written: "):
        check_writable(tmp_path / place)
    check_writable(tmp_path / "new" / "folder" / "file")
    check_writable(tmp_path / "folder", or_folder=True)
    with pytest.raises(InvalidArgument, match="it is not a regular file"):
        check_writable(tmp_path / "pipe", or_folder=True)
    assert names(tmp_path) == ["file", "folder", "pipe"]
