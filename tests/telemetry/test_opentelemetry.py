"""Spans as the real SDK exports them, into memory and over HTTP to a collector."""

from __future__ import annotations

import asyncio
import time

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock.telemetry.background_writer import BackgroundWriter
from penstock.telemetry.opentelemetry import OpenTelemetry, otlp_http
from servers import Request, answer, serving_in_thread
from traces import PARENT_ID, SPAN_ID, TRACE_ID, US, T, a_trace, in_a_distributed_trace


def exported(*traces: object) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    sink = OpenTelemetry(exporter, "1.2")
    sink.write(traces)  # type: ignore[arg-type]
    sink.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def context(span: ReadableSpan) -> tuple[str, str]:
    found = span.get_span_context()
    assert found is not None
    return f"{found.trace_id:032x}", f"{found.span_id:016x}"


def test_the_spans_of_a_request_in_the_callers_trace() -> None:
    spans = exported(in_a_distributed_trace())
    assert sorted(spans) == ["compute", "queue", "request"]
    request, queue, compute = spans["request"], spans["queue"], spans["compute"]
    assert context(request) == (TRACE_ID, SPAN_ID)
    assert request.parent is not None
    assert (f"{request.parent.span_id:016x}", request.parent.is_remote) == (PARENT_ID, True)
    assert request.get_span_context().trace_state.to_header() == "vendor=x"  # type: ignore[union-attr]
    assert request.kind is SpanKind.SERVER
    assert request.status.status_code is StatusCode.UNSET
    for span in (queue, compute):
        assert span.parent == request.get_span_context()
        assert context(span)[0] == TRACE_ID
        assert context(span)[1] not in (SPAN_ID, PARENT_ID)
    assert request.attributes == {
        "penstock.model.name": "m",
        "penstock.model.version": "3",
        "penstock.request.id": "a",
        "penstock.status": "OK",
    }
    assert compute.attributes == {"penstock.batch.rows": 5, "penstock.batch.reason": "idle"}
    assert request.resource.attributes["service.name"] == "penstock"
    assert request.resource.attributes["service.version"] == "1.2"


def test_the_times_of_spans_are_those_of_the_stages_on_the_wall_clock() -> None:
    before = time.time_ns() - time.monotonic_ns()
    spans = exported(in_a_distributed_trace())
    after = time.time_ns() - time.monotonic_ns()
    times = {name: (span.start_time, span.end_time) for name, span in spans.items()}
    start = times["request"][0]
    assert start is not None
    assert min(before, after) - 10**7 <= start - T <= max(before, after) + 10**7
    assert times == {
        "request": (start, start + 110 * US),
        "queue": (start, start + 60 * US),
        "compute": (start + 60 * US, start + 84 * US),
    }


def test_a_trace_of_our_own_has_no_parent() -> None:
    context_ = in_a_distributed_trace().context
    request = exported(a_trace(context=context_))["request"]
    assert request.parent is None
    assert context(request) == (TRACE_ID, SPAN_ID)


def test_a_request_that_failed_before_it_ran_is_one_span_with_an_error() -> None:
    spans = exported(in_a_distributed_trace(times=None, status="RESOURCE_EXHAUSTED"))
    assert list(spans) == ["request"]
    status = spans["request"].status
    assert (status.status_code, status.description) == (StatusCode.ERROR, "RESOURCE_EXHAUSTED")


def test_a_collector_receives_them_over_http() -> None:
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    async def collect(request: Request, writer: asyncio.StreamWriter) -> None:
        assert request.headers["content-type"] == "application/x-protobuf"
        received.append((request.path, ExportTraceServiceRequest.FromString(request.body)))
        writer.write(answer(b""))

    with serving_in_thread(collect) as address:
        sink = OpenTelemetry(otlp_http(f"http://{address.host}:{address.port}/v1/traces"), "1.2")
        sink.write([in_a_distributed_trace()])
        sink.close()
    ((path, message),) = received
    assert path == "/v1/traces"
    (resource,) = message.resource_spans
    spans = {span.name: span for span in resource.scope_spans[0].spans}
    assert sorted(spans) == ["compute", "queue", "request"]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    assert spans["request"].parent_span_id.hex() == PARENT_ID
    assert spans["compute"].parent_span_id.hex() == SPAN_ID


def test_what_a_collector_does_not_take_is_counted() -> None:
    with serving_in_thread(collector_that_hangs_up) as address:
        sink = OpenTelemetry(otlp_http(f"http://{address.host}:{address.port}"), "1.2")
        writer = BackgroundWriter("opentelemetry", sink)
        writer.start()
        writer.put(in_a_distributed_trace())
        writer.stop(timeout_s=20)
    assert writer.dropped == 1


async def collector_that_hangs_up(request: Request, writer: asyncio.StreamWriter) -> None:
    writer.close()
