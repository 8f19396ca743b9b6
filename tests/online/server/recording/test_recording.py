"""Recording follows the configuration."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import InvalidConfig
from penstock.online.server.config import ServerConfig
from penstock.online.server.recording.recording import Recording
from penstock.request import InferRequest, InferResponse


def record_one(recording: Recording) -> None:
    recording.start()
    trace = recording.tracer.begin(InferRequest("m", {"x": np.zeros(2, np.float32)}, id="a"))
    assert trace is not None
    recording.tracer.watching(trace, lambda outcome: None)(InferResponse("m", "1", {}))
    recording.stop()


def test_by_default_nothing_is() -> None:
    recording = Recording.open(ServerConfig())
    assert not recording.tracer.enabled
    recording.start()
    recording.stop()
    assert recording.dropped == 0


def test_access_log_and_trace_file(tmp_path: Path) -> None:
    config = ServerConfig(
        access_log=str(tmp_path / "access.log"),
        trace_file=str(tmp_path / "trace.json"),
        trace_level="TIMESTAMPS",
        trace_rate=1,
    )
    record_one(Recording.open(config))
    assert json.loads((tmp_path / "access.log").read_text())["request_id"] == "a"
    assert json.loads((tmp_path / "trace.json").read_text())[0]["request_id"] == "a"


def test_each_process_has_a_trace_file_of_its_own(tmp_path: Path) -> None:
    config = ServerConfig(trace_file=str(tmp_path / "t"), trace_level="TIMESTAMPS", trace_rate=1, trace_log_frequency=5)
    for process in range(2):
        record_one(Recording.open(config, process))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.0", "t.p1.0"]


def test_the_trace_settings_are_the_configurations() -> None:
    config = ServerConfig(trace_rate=7, trace_count=8, trace_log_frequency=9, trace_mode="opentelemetry")
    assert Recording.open(config).tracer.settings() == {
        "trace_level": ["OFF"],
        "trace_rate": "7",
        "trace_count": "8",
        "log_frequency": "9",
        "trace_file": "",
        "trace_mode": "opentelemetry",
    }


def test_with_a_collector_traces_can_be_switched_on_later() -> None:
    recording = Recording.open(ServerConfig(trace_endpoint="http://127.0.0.1:9/v1/traces", trace_mode="opentelemetry"))
    assert not recording.tracer.enabled
    recording.tracer.settings("", {"trace_level": ["TIMESTAMPS"]})
    assert recording.tracer.enabled


def test_the_servers_own_messages_go_where_they_shall(tmp_path: Path) -> None:
    recording = Recording.open(ServerConfig(log_file=str(tmp_path / "log"), log_format="ISO8601", log_verbose_level=1))
    recording.start()
    logging.getLogger("penstock.somewhere").debug("hello")
    recording.stop()
    assert (tmp_path / "log").read_text().endswith("] hello\n")


@pytest.mark.parametrize("setting", ["access_log", "trace_file", "log_file"])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, setting: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{setting}.*(No such file|does not exist)"):
        Recording.open(ServerConfig(**{setting: str(tmp_path / "missing" / "file")})).start()


def test_a_trace_endpoint_that_is_no_url() -> None:
    with pytest.raises(InvalidConfig, match="'trace_endpoint' is not an HTTP URL.*collector.*e.g. http://"):
        Recording.open(ServerConfig(trace_endpoint="collector:4318"))
