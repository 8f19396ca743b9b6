from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import InvalidData
from penstock.samples.json_lines import json_lines


def test_each_line_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"x": [1, 2]}\n\n  \n{"x": [3], "labels": "a"}')
    assert list(json_lines(path)) == [{"x": [1, 2]}, {"x": [3], "labels": "a"}]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"x": 1}\n{"x": }', "line 2 is not JSON"),
        ('{"x": 1}\n\n[1]', "line 3 is not a JSON object"),
        ("\x00\n", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"x": "\udcff"}', "line 1 is not JSON"),
    ],
)
def test_other_lines_are_named(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidData, match=cause) as raised:
        list(json_lines(path))
    assert "data.jsonl" in raised.value.message


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"x": 1}\n', encoding="utf-8-sig")
    assert list(json_lines(path)) == [{"x": 1}]
