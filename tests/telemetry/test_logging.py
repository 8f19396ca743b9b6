"""The server's own log as the settings say."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidArgument
from penstock.telemetry.logging import LogSetting, LogSettings

LEVELS = ("debug", "info", "warning", "error", "critical")


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("test_of_log_settings")


def everything(logger: logging.Logger) -> None:
    for level in LEVELS:
        getattr(logger.getChild("part"), level)("a message of level %s", level)


def shown(path: Path, logger: logging.Logger, setting: LogSetting) -> list[str]:
    settings = LogSettings(setting, logger)
    settings.start()
    everything(logger)
    settings.stop()
    return re.findall(r"level (\w+)", path.read_text())


def test_the_defaults_are_tritons() -> None:
    assert LogSettings().get() == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }


@pytest.mark.parametrize(
    ("changes", "levels"),
    [
        ({}, "info warning error critical"),
        ({"log_info": False}, "warning error critical"),
        ({"log_warning": False}, "info error critical"),
        ({"log_error": False}, "info warning"),
        ({"log_verbose_level": 1}, "debug info warning error critical"),
    ],
)
def test_levels_are_shown_or_not(tmp_path: Path, logger: logging.Logger, changes: dict[str, Any], levels: str) -> None:
    path = tmp_path / "log"
    assert shown(path, logger, LogSetting(log_file=str(path), **changes)) == levels.split()


def test_settings_change_while_the_server_runs(tmp_path: Path, logger: logging.Logger) -> None:
    path = tmp_path / "log"
    settings = LogSettings(LogSetting(log_file=str(path)), logger)
    settings.start()
    assert settings.update({"log_info": False, "log_warning": False})["log_info"] is False
    everything(logger)
    settings.update({"log_verbose_level": 2})
    everything(logger)
    settings.stop()
    everything(logger)
    assert re.findall(r"level (\w+)", path.read_text()) == ["error", "critical", "debug", "error", "critical"]


def test_the_formats(tmp_path: Path, logger: logging.Logger) -> None:
    path = tmp_path / "log"
    settings = LogSettings(LogSetting(log_file=str(path)), logger)
    settings.start()
    logger.warning("first")
    settings.update({"log_format": "ISO8601"})
    logger.info("second")
    settings.stop()
    first, second = path.read_text().splitlines()
    assert re.fullmatch(r"W\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ test_logging\.py:\d+\] first", first)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ test_logging\.py:\d+\] second", second)


def test_a_client_cannot_make_a_line_of_its_own(tmp_path: Path, logger: logging.Logger) -> None:
    path = tmp_path / "log"
    settings = LogSettings(LogSetting(log_file=str(path)), logger)
    settings.start()
    logger.error("model '%s'", "a\nE1121 forged\r\x1b[2J\x9b\u2028")
    logger.error("%s", "x" * 1_000_000)
    settings.stop()
    first, second = path.read_text().splitlines()
    assert first.endswith(r"model 'a\nE1121 forged\r\x1b[2J\x9b\u2028'")
    assert 8000 < len(second) < 8300


def test_the_traceback_of_our_own_error_is_shown(tmp_path: Path, logger: logging.Logger) -> None:
    path = tmp_path / "log"
    settings = LogSettings(LogSetting(log_file=str(path)), logger)
    settings.start()
    try:
        raise ValueError("a bug\nE1121 forged \x1b[2J" + "x" * 1_000_000)
    except ValueError:
        logger.exception("request failed")
    settings.stop()
    first, *lines = path.read_text().splitlines()
    assert first.endswith("] request failed")
    assert lines[0] == "  Traceback (most recent call last):"
    assert any(line.startswith(r"  E1121 forged \x1b[2Jxxx") for line in lines)
    assert all(line.startswith("  ") for line in lines)
    assert sum(map(len, lines)) < 40_000


def test_stderr_and_the_state_before(capsys: pytest.CaptureFixture[str], logger: logging.Logger) -> None:
    logger.setLevel(logging.ERROR)
    settings = LogSettings(logger=logger)
    settings.start()
    logger.info("hello")
    settings.stop()
    settings.stop()
    assert capsys.readouterr().err.endswith("] hello\n")
    assert (logger.level, logger.propagate, logger.handlers) == (logging.ERROR, True, [])
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"log_info": 1}, "log_info must be true or false"),
        ({"log_error": "true"}, "log_error must be"),
        ({"log_verbose_level": -1}, "log_verbose_level must be"),
        ({"log_verbose_level": True}, "log_verbose_level must be"),
        ({"log_verbose_level": 2**40}, "log_verbose_level must be"),
        ({"log_format": "xml"}, "log_format must be 'default' or 'ISO8601'"),
        ({"log_format": ["default"]}, "log_format must be"),
        ({"log_file": "/etc/passwd"}, "log file location can not be updated through network protocol"),
        ({"x" * 1000: 1}, "unknown log setting 'x{80}…'"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(given: dict[str, Any], message: str) -> None:
    settings = LogSettings()
    before = settings.get()
    with pytest.raises(InvalidArgument, match=message):
        settings.update({"log_info": False} | given)
    assert settings.get() == before


def test_a_file_that_cannot_be_written_is_known_at_the_start(tmp_path: Path, logger: logging.Logger) -> None:
    with pytest.raises(OSError, match="No such file"):
        LogSettings(LogSetting(log_file=str(tmp_path / "missing" / "log")), logger).start()
    assert logger.handlers == []


def test_what_was_shown_may_be_sent_back() -> None:
    settings = LogSettings(LogSetting(log_file="log"))
    assert settings.update(settings.get()) == settings.get()
