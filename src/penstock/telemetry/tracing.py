"""Records of single requests, with the time of each stage, for traces and the access log.

Tracer.begin ── sampled or logged? ── no ──→ None, and the request costs nothing more
                        │ yes
                        ▼
Trace on the request ── Tracer.computed, once a batch ── Trace.end ──→ background writers
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.background_writer import BackgroundWriter
from penstock.telemetry.statistics import BatchTimes, Reason
from penstock.telemetry.trace_context import TraceContext
from penstock.telemetry.trace_settings import TraceSettings
from penstock.tensor import Array

OK = "OK"
"""Status of a request that was answered."""

_MAX_TEXT = 256
"""Maximum number of recorded characters of a request id or a model name, because clients choose their length."""


class Trace(msgspec.Struct, eq=False):
    """One request. Times are ``time.monotonic_ns``; 0 means that the request did not reach the stage."""

    number: int
    """Sequence number."""
    mode: str
    """The exporter, ``triton`` or ``opentelemetry``; empty if the request was not sampled."""
    parent: TraceContext | None
    """The caller's span."""
    context: TraceContext | None
    """This request's span; None if neither the caller nor the server traces it."""
    model_name: str
    model_version: str
    request_id: str
    client: str
    bytes_in: int
    """Bytes of the input tensors."""
    started_ns: int
    times: BatchTimes | None = None
    batch_rows: int = 0
    reason: Reason | None = None
    bytes_out: int = 0
    """Bytes of the output tensors of all responses."""
    status: str = OK
    """``OK`` or the error's code."""
    ended_ns: int = 0


class _Sampler:
    """Selects one in ``rate`` requests, and every request whose caller traces it, but at most ``count`` requests in total."""

    def __init__(self, rate: int, count: int) -> None:
        self._rate = rate
        self._left = count
        self._seen = 0

    def sample(self, parent: TraceContext | None) -> bool:
        if not self._left:
            return False
        if parent is None:
            self._seen += 1
            if self._seen < self._rate:
                return False
            self._seen = 0
        elif not parent.sampled:
            return False
        if self._left > 0:
            self._left -= 1
        return True


class Tracer:
    """Decides which requests to record, and passes the records to the exporters and the access log. Used only on the event loop."""

    def __init__(
        self,
        settings: TraceSettings,
        exporters: Mapping[str, BackgroundWriter[Trace]] | None = None,
        access_log: BackgroundWriter[Trace] | None = None,
    ) -> None:
        """``exporters`` maps each trace mode to a writer. The caller starts and stops the writers."""
        self.enabled = False
        """True if any request may be recorded. If False, reading this flag is the only cost of tracing for a request."""
        self._settings = settings
        self._exporters = dict(exporters or {})
        self._access_log = access_log
        self._samplers: dict[str, _Sampler | None] = {}
        self._begun = 0
        self._refresh()

    def settings(self, model: str = "", update: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Apply ``update``, if any, and return the effective setting of ``model`` (empty: the global one). Raises InvalidArgument."""
        if not update:
            return self._settings.get(model)
        result = self._settings.update(model, update)
        if model:
            self._samplers.pop(model, None)
        else:
            self._samplers.clear()
        self._refresh()
        return result

    def changes(self) -> dict[str, dict[str, Any]]:
        """The changed settings by model. To apply them to another tracer, pass them to its ``settings``."""
        return self._settings.changes()

    def begin(self, request: InferRequest, traceparent: str = "", tracestate: str = "") -> Trace | None:
        """Begin the record of a request; None if it is not recorded.

        If the tracer is ``enabled``, call this first for every request.
        """
        parent = TraceContext.parse(traceparent, tracestate) if traceparent else None
        sampler = self._sampler(request.model_name)
        is_sampled = sampler is not None and sampler.sample(parent)
        if not is_sampled and self._access_log is None:
            return None
        self._begun += 1
        context = parent.child(is_sampled) if parent else TraceContext.new(is_sampled) if is_sampled else None
        return Trace(
            number=self._begun,
            mode=self._settings.of(request.model_name).trace_mode if is_sampled else "",
            parent=parent,
            context=context,
            model_name=request.model_name[:_MAX_TEXT],
            model_version=request.model_version,
            request_id=request.id[:_MAX_TEXT],
            client=request.client,
            bytes_in=_size(request.inputs),
            started_ns=time.monotonic_ns(),
        )

    def computed(self, traces: Iterable[object], rows: int, reason: Reason, times: BatchTimes) -> None:
        """Add a batch's times to its requests' records. If ``enabled``, call this for every batch before its requests are answered."""
        for trace in traces:
            if isinstance(trace, Trace):
                trace.times, trace.batch_rows, trace.reason = times, rows, reason

    def watching(self, trace: Trace, done: Done) -> Done:
        """A callback that records each response and passes it on to ``done``."""

        def watched(outcome: Outcome) -> None:
            self._answered(trace, outcome)
            done(outcome)

        return watched

    def _answered(self, trace: Trace, outcome: Outcome) -> None:
        if isinstance(outcome, InferResponse):
            trace.model_version = outcome.model_version
            trace.bytes_out += _size(outcome.outputs)
            if not outcome.final:
                return
        else:
            trace.status = outcome.code.value if isinstance(outcome, PenstockError) else "INTERNAL"
        trace.ended_ns = time.monotonic_ns()
        if self._access_log is not None:
            self._access_log.put(trace)
        if trace.mode:
            self._exporters[trace.mode].put(trace)

    def _sampler(self, model: str) -> _Sampler | None:
        """The sampler of ``model``; None if it is not traced. As in Triton, models without their own setting share a sampler."""
        own = model if self._settings.has_own(model) else ""
        if own not in self._samplers:
            setting = self._settings.of(own)
            is_on = setting.is_on and setting.trace_mode in self._exporters
            self._samplers[own] = _Sampler(setting.trace_rate, setting.trace_count) if is_on else None
        return self._samplers[own]

    def _refresh(self) -> None:
        self.enabled = self._access_log is not None or (bool(self._exporters) and self._settings.is_on)


def _size(tensors: Mapping[str, Array]) -> int:
    """Bytes of the tensors. For strings, only the content is counted."""
    return sum(sum(map(len, array.flat)) if array.dtype.kind == "O" else array.nbytes for array in tensors.values())
