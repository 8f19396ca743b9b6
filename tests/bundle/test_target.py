"""A build finds out at its start whether its bundle can be written."""

from pathlib import Path

import pytest

import models
from penstock.bundle.pack_model import pack_model
from penstock.bundle.target import check_target
from penstock.errors import AlreadyExists, InvalidArgument


def check(target: Path, overwrite: bool = False, folder: bool = False) -> None:
    check_target(target, "m", "1", overwrite=overwrite, folder=folder)


def test_a_new_path_is_a_target(tmp_path: Path) -> None:
    check(tmp_path / "new.bundle")


def test_an_empty_folder_is_a_target_only_for_a_folder(tmp_path: Path) -> None:
    check(tmp_path, folder=True)
    with pytest.raises(AlreadyExists, match="is a folder") as caught:
        check(tmp_path, overwrite=True)
    assert "model.bundle" in caught.value.hint


def test_a_bundle_may_be_replaced(tmp_path: Path) -> None:
    pack_model(models.linear(), tmp_path / "old.bundle")
    check(tmp_path / "old.bundle")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_other_files_is_kept(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(AlreadyExists, match="is a folder that is not a bundle"):
        check(tmp_path, overwrite, folder=True)


def test_another_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    other = tmp_path / "data.npz"
    other.touch()
    check(other, overwrite=True)
    with pytest.raises(AlreadyExists, match="exists and is not a bundle"):
        check(other)


@pytest.mark.parametrize(("name", "version"), [("a/b", "1"), ("m", "0"), ("m", "one")])
def test_names_and_versions_that_a_server_would_reject(tmp_path: Path, name: str, version: str) -> None:
    with pytest.raises(InvalidArgument):
        check_target(tmp_path / "new.bundle", name, version, overwrite=False, folder=False)
