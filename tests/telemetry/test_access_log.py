"""A line for every request, without confidential content."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.telemetry.access_log import AccessLog, line_of
from traces import TRACE_ID, US, T, a_trace, in_a_distributed_trace


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_field_of_a_line() -> None:
    epoch = 1_795_271_474_123_456_000
    assert line_of(in_a_distributed_trace(), epoch - T - 110 * US) == {
        "time": "2026-11-21T14:31:14.123456Z",
        "client": "shop",
        "model": "m",
        "version": "3",
        "request_id": "a",
        "status": "OK",
        "bytes_in": 12,
        "bytes_out": 8,
        "duration_us": 110,
        "queue_us": 60,
        "compute_us": 24,
        "batch_rows": 5,
        "trace_id": TRACE_ID,
    }


def test_a_request_that_was_refused() -> None:
    line = line_of(a_trace(times=None, status="NOT_FOUND", batch_rows=0), 0)
    assert (line["status"], line["queue_us"], line["compute_us"], line["trace_id"]) == ("NOT_FOUND", 0, 0, "")


def test_one_line_a_request_whatever_its_id_holds(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    path.write_text('{"status":"kept"}\n')
    log = AccessLog(str(path))
    log.write([a_trace(request_id='a\n{"status":"forged"}'), a_trace(status="CANCELLED")])
    log.close()
    assert [line["status"] for line in lines(path)] == ["kept", "OK", "CANCELLED"]


def test_the_log_cannot_control_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path))
    sent = "".join(map(chr, [*range(0x20), 0x7F, *range(0x80, 0xA0), 0x202E, 0x2028, 0x1F600])) + '"\\'
    log.write([a_trace(request_id=sent), a_trace(request_id="a\x7fb")])
    log.close()
    assert [line["request_id"] for line in lines(path)] == [sent, "a\x7fb"]
    assert all(0x20 <= byte < 0x7F or byte == 0x0A for byte in path.read_bytes())


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path))
    log.write([a_trace(request_id="1")])
    path.rename(tmp_path / "access.log.1")
    log.write([a_trace(request_id="2")])
    path.unlink()
    log.write([a_trace(request_id="3")])
    log.close()
    assert [line["request_id"] for line in lines(tmp_path / "access.log.1")] == ["1"]
    assert [line["request_id"] for line in lines(path)] == ["3"]


def test_others_may_not_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        AccessLog(str(tmp_path / "access.log")).close()
    finally:
        os.umask(before)
    assert (tmp_path / "access.log").stat().st_mode & 0o777 == 0o640


def test_stdout(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log = AccessLog("-")
    log.write([a_trace()])
    log.close()
    assert json.loads(capfdbinary.readouterr().out)["model"] == "m"


def test_a_file_that_cannot_be_written_is_known_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        AccessLog(str(tmp_path / "missing" / "access.log"))
