from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.errors import InvalidArgument
from penstock.samples.user_code import iterated, load_function


def test_functions_are_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_data.py").write_text("def samples(n=1):\n    return [n]\nlimit = 3\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert load_function("my_own_data:samples", "data")(4) == [4]
    assert sys.path == before
    for name, cause in {
        "my_own_data:none": "AttributeError",
        "my_own_data:limit": "the data .* is not a function",
    }.items():
        with pytest.raises(InvalidArgument, match=cause):
            load_function(name, "data")


def test_what_an_iterator_prints_is_no_output_and_what_its_reader_prints_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def loud():
        for number in range(2):
            print(f"making {number}")
            yield number

    for number in iterated(loud()):
        print(f"reading {number}")
    found = capfd.readouterr()
    assert found.out == "reading 0\nreading 1\n"
    assert found.err == "making 0\nmaking 1\n"
