from __future__ import annotations

import pytest

from penstock.errors import InvalidArgument
from penstock.storage.base import check_contained, is_contained


@pytest.mark.parametrize("path", ["a", "a/b.onnx", "a..b", "..a/b", "é/ü", "~"])
def test_paths_below_the_root(path: str) -> None:
    assert is_contained(path)
    assert check_contained(path) == path


@pytest.mark.parametrize("path", ["", ".", "..", "/a", "//a", "a/../b", "a//b", "a/", "./a", "a\\b", "a\0"])
def test_paths_that_may_leave_the_root(path: str) -> None:
    assert not is_contained(path)
    with pytest.raises(InvalidArgument, match="is not relative to the storage's root"):
        check_contained(path)
