"""The records of single requests that a server's configuration asks for: traces, access log, its own messages."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from penstock.errors import InvalidConfig, Unavailable
from penstock.online.server.config import ServerConfig
from penstock.online.server.request_recorder import RequestFolder, RequestRecorder
from penstock.telemetry.access_log import AccessLog
from penstock.telemetry.background_writer import BackgroundWriter
from penstock.telemetry.logging import LogSetting, LogSettings
from penstock.telemetry.trace_file import TraceFile
from penstock.telemetry.trace_settings import TraceSetting, TraceSettings
from penstock.telemetry.tracing import Trace, Tracer
from penstock.version import __version__

_WRITABLE = "name a file in a folder that may be written to"


class Recording:
    """Everything that records requests one by one, of one process.

    ``start`` before the first request, in the process that serves; ``stop`` after the last answer, to have all of it written.
    """

    def __init__(self, config: ServerConfig, process: int = 0) -> None:
        """``process`` numbers the server's processes from 0; each has a trace file of its own.

        Raises InvalidConfig if a file cannot be written, Unavailable where the package for OpenTelemetry is not installed.
        """
        settings = TraceSettings(
            TraceSetting(
                trace_file=config.trace_file,
                trace_level=config.trace_level,
                trace_rate=config.trace_rate,
                trace_count=config.trace_count,
                log_frequency=config.trace_log_frequency,
                trace_mode=config.trace_mode,
            )
        )
        exporters: dict[str, BackgroundWriter[Trace]] = {}
        if config.trace_file:
            path = Path(config.trace_file + (f".p{process}" if process else ""))
            file = TraceFile(path, settings)
            file.check()
            exporters["triton"] = BackgroundWriter("trace file", file)
        if config.trace_endpoint:
            exporters["opentelemetry"] = BackgroundWriter("opentelemetry", _open_telemetry(config.trace_endpoint))
        access_log = BackgroundWriter("access log", _access_log(config.access_log)) if config.access_log else None
        self.tracer = Tracer(settings, exporters, access_log)
        self.log = LogSettings(
            LogSetting(
                log_file=config.log_file,
                log_info=config.log_info,
                log_warning=config.log_warning,
                log_error=config.log_error,
                log_verbose_level=config.log_verbose_level,
                log_format=config.log_format,
            )
        )
        self._writers: list[BackgroundWriter[Any]] = [*exporters.values(), *([access_log] if access_log else [])]
        self.requests: RequestRecorder | None = None
        """Keeps requests to warm models up with; one process does, as all of them get the same."""
        if config.warmup_record and process == 0:
            files = RequestFolder(config.warmup_folder, config.warmup_record)
            self._writers.append(writer := BackgroundWriter("recorded requests", files, limit=100))
            self.requests = RequestRecorder(writer, config.warmup_record)

    @property
    def dropped(self) -> int:
        """Records that could not be kept up with or not be written."""
        return sum(writer.dropped for writer in self._writers)

    def start(self) -> None:
        """Raises InvalidConfig if the log file cannot be opened."""
        try:
            self.log.start()
        except OSError as error:
            raise InvalidConfig(
                f"cannot write to '{self.log.get()['log_file']}', given as 'log_file': {error.strerror}", _WRITABLE
            ) from None
        for writer in self._writers:
            writer.start()

    def stop(self) -> None:
        """Write what is left; takes a few seconds at most."""
        for writer in self._writers:
            writer.stop()
        self.log.stop()


def _access_log(target: str) -> AccessLog:
    try:
        return AccessLog(target)
    except OSError as error:
        raise InvalidConfig(f"cannot write to '{target}', given as 'access_log': {error.strerror}", _WRITABLE) from None


def _open_telemetry(endpoint: str) -> Any:
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidConfig(
            f"'trace_endpoint' is not a URL of HTTP: '{endpoint}'", "e.g. http://127.0.0.1:4318/v1/traces"
        )
    try:
        module = importlib.import_module("penstock.telemetry.opentelemetry")
    except ImportError as error:
        raise Unavailable(f"OpenTelemetry is not available: {error}", "pip install 'penstock[otel]'") from None
    return module.OpenTelemetry(module.otlp_http(endpoint), __version__)
