from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import InvalidArgument
from penstock.offline.compress.model_files import check_place


def test_places_that_cannot_or_must_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written"):
        check_place(Path("/proc/penstock.onnx"), [])
    with pytest.raises(InvalidArgument, match="would overwrite"):
        check_place(tmp_path / "folder" / ".." / "x", [tmp_path / "x"])
