"""Sets up traces, the access log, recorded requests and log messages according to the configuration."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import InvalidConfig, Unavailable
from penstock.online.server.config import ServerConfig
from penstock.online.server.recording.request_recorder import RequestFolder, RequestRecorder
from penstock.telemetry.access_log import AccessLog
from penstock.telemetry.background_writer import BackgroundWriter
from penstock.telemetry.logging import LogSetting, LogSettings
from penstock.telemetry.trace_file import TraceFile
from penstock.telemetry.trace_settings import TraceSetting, TraceSettings
from penstock.telemetry.tracing import Trace, Tracer
from penstock.version import __version__

_WRITABLE = "use a file in a folder that the server may write to"


class Recording:
    """All recorders of individual requests in one process.

    Call ``start`` before the first request, in the serving process, and ``stop`` after the last response.
    """

    def __init__(
        self,
        tracer: Tracer,
        log: LogSettings,
        writers: Sequence[BackgroundWriter[Any]],
        requests: RequestRecorder | None = None,
    ) -> None:
        """``writers`` write the records of ``tracer`` and ``requests``."""
        self.tracer = tracer
        self.log = log
        self.requests = requests
        """Records requests for warm-up. Only the first process has a recorder, because all processes serve the same models."""
        self._writers = writers

    @classmethod
    def open(cls, config: ServerConfig, process: int = 0) -> Recording:
        """Create the recorders that ``config`` requests. Process number ``process`` (from 0) has its own trace file.

        Raises InvalidConfig if a file cannot be written, and Unavailable if the OpenTelemetry package is not installed.
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
        writers: list[BackgroundWriter[Any]] = [*exporters.values(), *([access_log] if access_log else [])]
        requests = None
        if config.warmup_record and process == 0:
            files = RequestFolder(config.warmup_folder, config.warmup_record)
            writers.append(writer := BackgroundWriter("recorded requests", files, limit=100))
            requests = RequestRecorder(writer, config.warmup_record)
        log = LogSetting(**{name: getattr(config, name) for name in LogSetting.__struct_fields__})
        return cls(Tracer(settings, exporters, access_log), LogSettings(log), writers, requests)

    @property
    def dropped(self) -> int:
        """Number of records lost because a writer was too slow or failed."""
        return sum(writer.dropped for writer in self._writers)

    def start(self) -> None:
        """Start the writers. Raises InvalidConfig if the log file cannot be opened."""
        try:
            self.log.start()
        except OSError as error:
            raise InvalidConfig(
                f"cannot write to '{self.log.get()['log_file']}', given as 'log_file': {error.strerror}", _WRITABLE
            ) from None
        for writer in self._writers:
            writer.start()

    def stop(self) -> None:
        """Write the remaining records. Takes at most a few seconds."""
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
            f"'trace_endpoint' is not an HTTP URL: '{endpoint}'", "e.g. http://127.0.0.1:4318/v1/traces"
        )
    try:
        module = importlib.import_module("penstock.telemetry.opentelemetry")
    except ImportError as error:
        raise Unavailable(f"OpenTelemetry is not available: {error}", "pip install 'penstock[otel]'") from None
    return module.OpenTelemetry(module.otlp_http(endpoint), __version__)
