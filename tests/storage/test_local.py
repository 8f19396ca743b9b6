from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from conformance.storage import StorageConformance
from penstock.errors import AlreadyExists, InvalidArgument, NotFound
from penstock.storage.local import LocalStorage


class TestConformance(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(tmp_path / "root")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "root" / "out").symlink_to(tmp_path)
    (tmp_path / "root" / "file").symlink_to(tmp_path / "secret")
    return tmp_path / "root"


def test_links_out_of_the_root_are_refused(root: Path) -> None:
    storage = LocalStorage(root)
    for method in (storage.read, storage.digest, storage.localize, storage.remove):
        with pytest.raises(InvalidArgument, match="leads out of the storage through a link"):
            method("out/secret")
    with pytest.raises(InvalidArgument, match="through a link"):
        storage.write("out/new", b"")
    with pytest.raises(InvalidArgument, match="through a link"):
        storage.publish("out/new", {"a": b""})
    with pytest.raises(InvalidArgument, match="through a link"):
        storage.list("out")
    with pytest.raises(InvalidArgument, match="through a link"):
        storage.read("file")
    assert sorted(path.name for path in root.parent.iterdir()) == ["root", "secret"]


def test_writing_and_removing_touch_the_link_and_not_what_it_names(root: Path) -> None:
    storage = LocalStorage(root)
    storage.write("file", b"new")
    assert storage.read("file") == b"new"
    storage.remove("out")
    assert (root.parent / "secret").read_text() == "secret"


def test_links_out_of_the_root_are_followed_for_a_trusted_root(root: Path) -> None:
    storage = LocalStorage(root, follows_links=True)
    assert storage.read("out/secret") == storage.read("file") == b"secret"


def test_links_within_the_root_are_followed(root: Path) -> None:
    (root / "a").write_bytes(b"data")
    (root / "b").symlink_to("a")
    assert LocalStorage(root).read("b") == b"data"


def test_links_that_lead_nowhere_are_listed_without_a_stamp(root: Path) -> None:
    (root / "nowhere").symlink_to(root / "absent")
    (root / "circle").symlink_to("circle")
    stamps = {entry.name: entry.stamp for entry in LocalStorage(root).list() if not entry.is_folder}
    assert stamps["nowhere"] == stamps["circle"] == ""
    assert stamps["file"]


def test_a_half_written_file_is_not_listed(root: Path) -> None:
    (root / "m.onnx.0123.partial").write_bytes(b"half")
    assert "m.onnx.0123.partial" not in {entry.name for entry in LocalStorage(root).list()}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_what_may_not_be_read_says_so(root: Path) -> None:
    (root / "closed").write_bytes(b"")
    (root / "closed").chmod(0)
    with pytest.raises(NotFound, match="cannot read 'closed': Permission denied"):
        LocalStorage(root).read("closed")


def test_a_folder_is_not_a_file(root: Path) -> None:
    (root / "m").mkdir()
    with pytest.raises(NotFound, match="cannot read 'm': Is a directory"):
        LocalStorage(root).read("m")


def test_of_several_publishers_one_wins(tmp_path: Path) -> None:
    storage, outcomes, gate = LocalStorage(tmp_path), [], threading.Barrier(8)

    def publish(number: int) -> None:
        gate.wait()
        try:
            storage.publish("m/1", {"a": b"%d" % number, "b": b"%d" % number})
            outcomes.append(number)
        except AlreadyExists:
            pass

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = outcomes
    assert storage.read("m/1/a") == storage.read("m/1/b") == b"%d" % winner
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["1"]
