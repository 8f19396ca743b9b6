"""Files of sources that cannot be read are errors that name them."""

import pytest

from penstock.errors import InvalidModel, NotFound
from penstock.offline.convert.reading import read_file


def test_a_file_is_read(tmp_path):
    (tmp_path / "m").write_bytes(b"model")
    assert read_file(tmp_path / "m", limit=5) == b"model"


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "large").write_bytes(bytes(1 << 21))
    with pytest.raises(NotFound, match="no network '.*missing'") as caught:
        read_file(tmp_path / "missing", "network", "give it")
    assert caught.value.hint == "give it"
    with pytest.raises(InvalidModel, match="model file 'empty' is empty"):
        read_file(tmp_path / "empty")
    with pytest.raises(InvalidModel, match="'large' is larger than 1 MiB"):
        read_file(tmp_path / "large", limit=1 << 20)
    with pytest.raises(InvalidModel, match="cannot be read"):
        read_file(tmp_path)
