"""Traces as OpenTelemetry spans (extra ``penstock[otel]``). A request's span has child spans for its time in the queue and in the
model.

``tracing.py`` has already decided which requests are sampled. Spans are created later from the recorded times, on the writer's
thread, because the SDK takes tens of microseconds per span.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from penstock.telemetry.trace_context import TraceContext
from penstock.telemetry.tracing import OK, Trace

_EXPORT_TIMEOUT_S = 5.0


class OpenTelemetry:
    """Converts traces to spans and passes them to ``exporter``. Only one thread may use an instance."""

    def __init__(self, exporter: SpanExporter, version: str, service: str = "penstock") -> None:
        """``version`` is the version of the server."""
        self._ids = _GivenIds()
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: service, SERVICE_VERSION: version}),
            sampler=ALWAYS_ON,
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        # The SDK's queue is not used, because it drops spans silently. The ``BackgroundWriter`` has its own queue and counts
        # dropped records.
        self._finished = _Finished()
        self._provider.add_span_processor(self._finished)
        self._exporter = exporter
        self._tracer = self._provider.get_tracer("penstock", version)

    def write(self, records: Sequence[Trace]) -> None:
        """Deliver ``records``. Blocks for some seconds if the collector does not respond. Raises OSError if the collector rejects
        the spans.
        """
        offset_ns = time.time_ns() - time.monotonic_ns()
        for record in records:
            self._make_spans(record, offset_ns)
        if self._exporter.export(self._finished.take()) is not SpanExportResult.SUCCESS:
            raise OSError("the collector did not accept the spans")

    def close(self) -> None:
        """Close the connection to the collector."""
        self._provider.shutdown()
        self._exporter.shutdown()

    def _make_spans(self, trace: Trace, offset_ns: int) -> None:
        attributes: dict[str, AttributeValue] = {
            "penstock.model.name": trace.model_name,
            "penstock.model.version": trace.model_version,
            "penstock.request.id": trace.request_id,
            "penstock.status": trace.status,
        }
        # Use the span id that was already sent to other services while the request ran.
        self._ids.next = trace.context
        request = self._tracer.start_span(
            "request",
            context=api.set_span_in_context(NonRecordingSpan(_remote(trace.parent))) if trace.parent else None,
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=trace.started_ns + offset_ns,
        )
        if trace.status != OK:
            request.set_status(Status(StatusCode.ERROR, trace.status))
        if trace.times is not None:
            within = api.set_span_in_context(request)
            taken_ns, split_ns = trace.times.taken_ns + offset_ns, trace.times.split_ns + offset_ns
            queue = self._tracer.start_span("queue", within, start_time=trace.started_ns + offset_ns)
            queue.end(taken_ns)
            compute = self._tracer.start_span(
                "compute",
                within,
                attributes={"penstock.batch.rows": trace.batch_rows, "penstock.batch.reason": str(trace.reason)},
                start_time=taken_ns,
            )
            compute.end(split_ns)
        request.end(trace.ended_ns + offset_ns)


def otlp_http(endpoint: str) -> SpanExporter:
    """Exporter to the collector ``endpoint``, e.g. ``http://localhost:4318/v1/traces``. If empty, the ``OTEL_*`` variables apply."""
    return OTLPSpanExporter(endpoint=endpoint or None, timeout=_EXPORT_TIMEOUT_S)


class _Finished(SpanProcessor):
    """Collects ended spans."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


class _GivenIds(IdGenerator):
    """Generates random ids, except for a span that already has ids."""

    def __init__(self) -> None:
        self.next: TraceContext | None = None
        self._random = RandomIdGenerator()

    def generate_span_id(self) -> int:
        context, self.next = self.next, None
        return int(context.span_id, 16) if context else self._random.generate_span_id()

    def generate_trace_id(self) -> int:
        return int(self.next.trace_id, 16) if self.next else self._random.generate_trace_id()


def _remote(context: TraceContext) -> SpanContext:
    return SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([context.state] if context.state else []),
    )
