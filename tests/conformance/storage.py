"""What every storage must do, as tests: a test file of a storage subclasses ``StorageConformance``."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import AlreadyExists, InvalidArgument, NotFound
from penstock.storage.base import Storage, is_contained

_PARTS = st.sampled_from(["..", ".", "", "a", "b.onnx", "\\", "c\\..", "\0", "~", "é"])
_PATHS = st.builds(lambda front, parts: front + "/".join(parts), st.sampled_from(["", "/", "//"]), st.lists(_PARTS))


class StorageConformance:
    """Subclass it as ``TestConformance`` with a fixture ``storage`` that is empty for each test."""

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError

    def test_what_was_written_is_read_and_listed(self, storage: Storage) -> None:
        storage.write("m/config.pbtxt", b"config")
        storage.write("m/1/model.onnx", b"model")
        assert storage.read("m/1/model.onnx") == b"model"
        assert [(one.name, one.is_folder, one.size_bytes) for one in storage.list("m")] == [
            ("1", True, 0),
            ("config.pbtxt", False, 6),
        ]
        assert [one.name for one in storage.list()] == ["m"]

    def test_replacing_a_file_changes_its_stamp(self, storage: Storage) -> None:
        storage.write("a", b"1")
        (before,) = storage.list()
        storage.write("a", b"2")
        (after,) = storage.list()
        assert storage.read("a") == b"2"
        assert before.stamp != after.stamp

    def test_digest_is_that_of_the_content(self, storage: Storage) -> None:
        storage.write("a", b"content")
        assert storage.digest("a") == hashlib.sha256(b"content").hexdigest()

    def test_reading_stops_at_a_limit(self, storage: Storage) -> None:
        storage.write("a", b"12345")
        assert storage.read("a", 5) == b"12345"
        with pytest.raises(InvalidArgument, match="'a' has more than 4 bytes"):
            storage.read("a", 4)

    def test_what_is_not_there_is_not_found(self, storage: Storage) -> None:
        for missing in (storage.read, storage.digest, storage.list, storage.localize):
            with pytest.raises(NotFound, match="'m/absent'"):
                missing("m/absent")

    def test_a_published_folder_is_whole_and_is_not_replaced(self, storage: Storage) -> None:
        storage.publish("m/1", {"model.onnx": b"model", "labels/en.txt": b"cat"})
        assert storage.read("m/1/labels/en.txt") == b"cat"
        with pytest.raises(AlreadyExists, match="'m/1'"):
            storage.publish("m/1", {"model.onnx": b"other"})
        assert storage.read("m/1/model.onnx") == b"model"

    def test_nothing_is_published_if_one_path_is_refused(self, storage: Storage) -> None:
        with pytest.raises(InvalidArgument):
            storage.publish("m/1", {"model.onnx": b"model", "../2/model.onnx": b"other"})
        with pytest.raises(NotFound):
            storage.list("m")

    def test_removing_takes_a_file_or_a_folder(self, storage: Storage) -> None:
        storage.write("m/1/a", b"")
        storage.write("m/1/b", b"")
        storage.remove("m/1/a")
        assert [one.name for one in storage.list("m/1")] == ["b"]
        for _ in range(2):
            storage.remove("m/1")
        with pytest.raises(NotFound):
            storage.read("m/1/b")

    def test_a_local_copy_has_the_content(self, storage: Storage) -> None:
        storage.write("m/1/model.onnx", b"model")
        storage.write("m/1/model.data", b"weights")
        folder = storage.localize("m/1")
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            "model.onnx": b"model",
            "model.data": b"weights",
        }

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors])
    @given(path=_PATHS)
    def test_no_path_leaves_the_root(self, storage: Storage, path: str) -> None:
        if is_contained(path):
            storage.write(path, b"data")
            assert storage.read(path) == b"data"
            storage.remove(path)
            return
        for refused in (storage.read, storage.digest, storage.localize, storage.remove):
            with pytest.raises(InvalidArgument, match="not relative"):
                refused(path)
        with pytest.raises(InvalidArgument, match="not relative"):
            storage.write(path, b"data")
        with pytest.raises(InvalidArgument, match="not relative"):
            storage.publish(path, {"a": b"data"})
