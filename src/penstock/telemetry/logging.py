"""Log settings of the server: Triton's names and values, applied to Python's logging."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidArgument, bounded, quoted, shortened

_FORMATS = ("default", "ISO8601")
_MOST_VERBOSE = 2**31 - 1
_MESSAGE_CHARACTERS = 8192
_TRACEBACK_BYTES = 32 << 10


class LogSetting(msgspec.Struct, frozen=True):
    """The current settings."""

    log_file: str = ""
    """File to which messages are appended; empty for stderr."""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    """If greater than 0, debug messages are logged."""
    log_format: Literal["default", "ISO8601"] = "default"


class LogSettings:
    """Manages the handler of one logger, by default Penstock's root logger."""

    def __init__(self, initial: LogSetting | None = None, logger: logging.Logger | None = None) -> None:
        self._setting = initial or LogSetting()
        self._logger = logger or logging.getLogger("penstock")
        self._handler: logging.Handler | None = None
        self._before = logging.NOTSET, True

    def start(self) -> None:
        """Install the handler for the current settings. Raises OSError if the file cannot be opened."""
        file = self._setting.log_file
        self._handler = _LogFile(file) if file else logging.StreamHandler(sys.stderr)
        self._before = self._logger.level, self._logger.propagate
        self._logger.addHandler(self._handler)
        self._logger.propagate = False
        self._apply()

    def stop(self) -> None:
        """Remove the handler, and restore the logger's previous level."""
        if self._handler is None:
            return
        self._logger.removeHandler(self._handler)
        with suppress(OSError):  # a full disk must not prevent an orderly exit
            self._handler.close()
        self._handler = None
        self._logger.setLevel(self._before[0])
        self._logger.propagate = self._before[1]

    def get(self) -> dict[str, Any]:
        """The settings under the protocol's names."""
        return msgspec.structs.asdict(self._setting)

    def update(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change the given settings and return all settings. If this raises InvalidArgument, nothing has changed."""
        # Clients may send the current file name, but cannot change it.
        kept = {"log_file": self._setting.log_file}.items()
        values = {name: _read(name, value) for name, value in changes.items() if (name, value) not in kept}
        self._setting = msgspec.structs.replace(self._setting, **values)
        self._apply()
        return self.get()

    def _apply(self) -> None:
        if self._handler is None:
            return
        setting = self._setting
        self._logger.setLevel(logging.DEBUG if setting.log_verbose_level else logging.INFO)
        self._handler.setFormatter(_Formatter(is_iso=setting.log_format == "ISO8601"))
        shown = {
            "D": setting.log_verbose_level > 0,
            "I": setting.log_info,
            "W": setting.log_warning,
            "E": setting.log_error,
        }
        for each in self._handler.filters[:]:
            self._handler.removeFilter(each)
        self._handler.addFilter(lambda record: shown[_letter(record.levelno)])


class _LogFile(logging.FileHandler):
    """Reports on stderr, once, that messages are being lost. The base class would print a traceback for each message."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name in the standard library
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            with suppress(OSError):
                sys.stderr.write(
                    f"log messages are being lost: cannot write to '{self.baseFilename}': {error.strerror}\n"
                )


class _Formatter(logging.Formatter):
    """As ``I1121 14:31:14.123456 77 dataplane.py:12] message`` or ``2026-11-21T14:31:14Z I 77 dataplane.py:12] message``, in UTC."""

    def __init__(self, is_iso: bool) -> None:
        super().__init__()
        self._is_iso = is_iso

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name in the standard library
        # Indented, so that no line of an exception's text looks like a line of the log.
        return "\n".join(f"  {line}" for line in bounded(super().formatException(ei), _TRACEBACK_BYTES).split("\n"))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in the standard library
        moment = time.gmtime(record.created)
        letter = _letter(record.levelno)
        if self._is_iso:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ ", moment) + letter
        else:
            when = time.strftime(f"{letter}%m%d %H:%M:%S.", moment) + f"{int(record.created % 1 * 1e6):06d}"
        # Text from a client must not be able to forge a log line, or to control a terminal.
        message = shortened(record.message, _MESSAGE_CHARACTERS)
        return f"{when} {record.process} {record.filename}:{record.lineno}] {message}"


def _letter(level: int) -> str:
    if level >= logging.ERROR:
        return "E"
    if level >= logging.WARNING:
        return "W"
    return "I" if level >= logging.INFO else "D"


def _read(name: str, value: Any) -> Any:
    match name:
        case "log_info" | "log_warning" | "log_error":
            if isinstance(value, bool):
                return value
            raise InvalidArgument(f"{name} must be true or false")
        case "log_verbose_level":
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_VERBOSE:
                return value
            raise InvalidArgument("log_verbose_level must be a whole number, 0 or more")
        case "log_format":
            if value in _FORMATS:
                return value
            raise InvalidArgument("log_format must be 'default' or 'ISO8601'")
        case "log_file":
            # If clients could change the path, any client could make the server write to any file.
            raise InvalidArgument(
                "log file location can not be updated through network protocol", "set log_file when starting the server"
            )
    raise InvalidArgument(
        f"unknown log setting {quoted(name)}", f"use one of: {', '.join(LogSetting.__struct_fields__)}"
    )
