"""Triton's trace files: whole JSON documents at any moment."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from penstock.errors import InvalidConfig
from penstock.telemetry.trace_file import TraceFile
from penstock.telemetry.trace_settings import TraceSetting, TraceSettings
from traces import US, T, a_trace


def test_a_trace_in_tritons_words(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json", TraceSettings())
    file.write([a_trace(number=7)])
    file.close()
    assert json.loads((tmp_path / "trace.json").read_text()) == [
        {"id": 7, "model_name": "m", "model_version": 3, "request_id": "a"},
        {
            "id": 7,
            "timestamps": [
                {"name": "REQUEST_START", "ns": T},
                {"name": "QUEUE_START", "ns": T},
                {"name": "COMPUTE_START", "ns": T + 60 * US},
                {"name": "COMPUTE_INPUT_END", "ns": T + 61 * US},
                {"name": "COMPUTE_OUTPUT_START", "ns": T + 81 * US},
                {"name": "COMPUTE_END", "ns": T + 84 * US},
                {"name": "REQUEST_END", "ns": T + 110 * US},
            ],
        },
    ]


def test_a_request_that_was_never_computed_and_a_version_that_is_no_number(tmp_path: Path) -> None:
    with closing(TraceFile(tmp_path / "t", TraceSettings())) as file:
        file.write([a_trace(times=None, model_version="")])
    about, moments = json.loads((tmp_path / "t").read_text())
    assert about["model_version"] == ""
    assert [moment["name"] for moment in moments["timestamps"]] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]


def test_the_file_is_whole_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("what was there before")
    seen = 0
    with closing(TraceFile(path, TraceSettings())) as file:
        for count in (1, 3, 2):
            file.write([a_trace(number=seen + each) for each in range(count)])
            seen += count
            assert [entry["id"] for entry in json.loads(path.read_text())[::2]] == list(range(seen))


def test_files_are_numbered_and_hold_so_many_traces(tmp_path: Path) -> None:
    settings = TraceSettings(TraceSetting(log_frequency=3))
    with closing(TraceFile(tmp_path / "t", settings)) as file:
        file.write([a_trace(number=each) for each in range(7)])
        file.write([a_trace(number=each) for each in range(7, 10)])
        settings.update("", {"log_frequency": "1"})
        file.write([a_trace(number=10)])
    found = {path.name: [entry["id"] for entry in json.loads(path.read_text())[::2]] for path in tmp_path.iterdir()}
    assert found == {"t.0": [0, 1, 2], "t.1": [3, 4, 5], "t.2": [6, 7, 8], "t.3": [9], "t.4": [10]}


def test_nothing_is_made_before_the_first_trace(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "t", TraceSettings())
    file.check()
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_known_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="does not exist"):
        TraceFile(tmp_path / "missing" / "t", TraceSettings()).check()
