"""The selection of recorded requests, and the content of their records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidArgument, NotFound
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.telemetry.background_writer import BackgroundWriter
from penstock.telemetry.statistics import BatchTimes, Reason
from penstock.telemetry.trace_settings import TraceSetting, TraceSettings
from penstock.telemetry.tracing import Trace, Tracer
from traces import PARENT_ID, TRACE_ID

ON = TraceSetting(trace_level="TIMESTAMPS", trace_rate=1)
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"


class Kept:
    def __init__(self) -> None:
        self.records: list[Trace] = []

    def write(self, records: Sequence[Trace]) -> None:
        self.records += records

    def close(self) -> None:
        pass


class Recorder:
    """A tracer, and the records that it has sent to file, collector and access log."""

    def __init__(self, setting: TraceSetting | None = None, access_log: bool = False) -> None:
        self.sinks = {name: Kept() for name in ("triton", "opentelemetry", "log")}
        self._writers = {name: BackgroundWriter(name, sink) for name, sink in self.sinks.items()}
        log = self._writers["log"] if access_log else None
        exporters = {name: writer for name, writer in self._writers.items() if name != "log"}
        self.tracer = Tracer(TraceSettings(setting), exporters, log)

    def stop(self) -> dict[str, list[Trace]]:
        for writer in self._writers.values():
            writer.start()
            writer.stop()
        return {name: sink.records for name, sink in self.sinks.items()}


def a_request(model: str = "m") -> InferRequest:
    inputs = {"x": np.zeros((2, 3), np.float32), "s": np.array([b"four", b""], dtype=object)}
    return InferRequest(model, inputs, id="a", client="shop")


def a_response(final: bool = True) -> InferResponse:
    return InferResponse("m", "3", {"y": np.zeros(5, np.int64)}, final=final)


def sampled(tracer: Tracer, count: int, model: str = "m", traceparent: str = "") -> int:
    return sum(tracer.begin(a_request(model), traceparent) is not None for _ in range(count))


def test_everything_is_off_by_default() -> None:
    assert not Tracer(TraceSettings()).enabled
    assert not Recorder().tracer.enabled


def test_a_level_without_anything_that_takes_traces_costs_nothing() -> None:
    assert not Tracer(TraceSettings(ON)).enabled


def test_a_request_from_its_beginning_to_its_answer() -> None:
    recorder = Recorder(ON, access_log=True)
    received: list[Outcome] = []
    before = time.monotonic_ns()
    trace = recorder.tracer.begin(a_request())
    assert trace is not None
    done = recorder.tracer.watching(trace, received.append)
    times = BatchTimes(before + 1, before + 2, before + 3, before + 4)
    recorder.tracer.computed([None, trace], 4, Reason.FULL, times)
    response = a_response()
    done(response)
    assert received == [response]
    records = recorder.stop()
    assert records == {"triton": [trace], "log": [trace], "opentelemetry": []}
    assert (trace.model_name, trace.model_version, trace.request_id, trace.client) == ("m", "3", "a", "shop")
    assert (trace.bytes_in, trace.bytes_out, trace.status) == (28, 40, "OK")
    assert (trace.times, trace.batch_rows, trace.reason) == (times, 4, Reason.FULL)
    assert before <= trace.started_ns <= trace.ended_ns <= time.monotonic_ns()


def test_what_a_client_calls_things_is_kept_in_short() -> None:
    recorder = Recorder(access_log=True)
    request = InferRequest("m" * 10_000, {}, id="a" * 10_000)
    trace = recorder.tracer.begin(request)
    assert trace is not None
    assert (len(trace.model_name), len(trace.request_id)) == (256, 256)


def test_a_request_that_failed() -> None:
    recorder = Recorder(access_log=True)
    received: list[Outcome] = []
    trace = recorder.tracer.begin(a_request("unknown"))
    assert trace is not None
    recorder.tracer.watching(trace, received.append)(NotFound("no such model"))
    assert isinstance(received[0], NotFound)
    assert recorder.stop() == {"triton": [], "opentelemetry": [], "log": [trace]}
    assert (trace.status, trace.model_version, trace.times, trace.bytes_out) == ("NOT_FOUND", "", None, 0)


def test_of_a_decoupled_models_answers_the_last_one_ends_the_record() -> None:
    recorder = Recorder(ON)
    trace = recorder.tracer.begin(a_request())
    assert trace is not None
    done = recorder.tracer.watching(trace, lambda outcome: None)
    done(a_response(final=False))
    done(a_response(final=False))
    assert trace.ended_ns == 0
    done(InferResponse("m", "3", {}))
    assert recorder.stop()["triton"] == [trace]
    assert trace.bytes_out == 80


@pytest.mark.parametrize(("rate", "expected"), [(1, 20), (4, 5), (20, 1), (21, 0)])
def test_one_in_so_many_requests_is_traced(rate: int, expected: int) -> None:
    recorder = Recorder(TraceSetting(trace_level="TIMESTAMPS", trace_rate=rate))
    assert sampled(recorder.tracer, 20) == expected


def test_the_caller_decides_for_its_own_requests() -> None:
    recorder = Recorder(TraceSetting(trace_level="TIMESTAMPS", trace_rate=1000))
    assert sampled(recorder.tracer, 5, traceparent=SAMPLED) == 5
    assert sampled(recorder.tracer, 5000, traceparent=UNSAMPLED) == 0
    assert sampled(recorder.tracer, 5, traceparent="broken") == 0


def test_a_caller_cannot_have_traced_what_is_off() -> None:
    recorder = Recorder(access_log=True)
    trace = recorder.tracer.begin(a_request(), SAMPLED)
    assert trace is not None
    assert trace.mode == ""
    recorder.tracer.watching(trace, lambda outcome: None)(a_response())
    assert recorder.stop()["triton"] == []


def test_after_so_many_traces_there_are_no_more_until_it_is_set_again() -> None:
    recorder = Recorder(TraceSetting(trace_level="TIMESTAMPS", trace_rate=2, trace_count=3))
    assert sampled(recorder.tracer, 10) == 3
    assert sampled(recorder.tracer, 10, traceparent=SAMPLED) == 0
    recorder.tracer.settings("other", {"trace_rate": "1"})
    assert sampled(recorder.tracer, 10) == 0
    assert sampled(recorder.tracer, 10, "other") == 3
    recorder.tracer.settings("", {"trace_count": "1"})
    assert sampled(recorder.tracer, 10) == 1


def test_settings_switch_it_on_and_off_while_the_server_runs() -> None:
    recorder = Recorder()
    tracer = recorder.tracer
    tracer.settings("m", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
    assert tracer.enabled
    assert (sampled(tracer, 1, "m"), sampled(tracer, 1, "other")) == (1, 0)
    assert tracer.settings("m")["trace_rate"] == "1"
    assert tracer.settings("m", {"trace_level": None})["trace_level"] == ["OFF"]
    assert not tracer.enabled
    with pytest.raises(InvalidArgument):
        tracer.settings("", {"trace_rate": "none"})


def test_traces_go_where_the_mode_says() -> None:
    recorder = Recorder(ON)
    recorder.tracer.settings("", {"trace_mode": "opentelemetry"})
    trace = recorder.tracer.begin(a_request())
    assert trace is not None
    recorder.tracer.watching(trace, lambda outcome: None)(a_response())
    assert recorder.stop() == {"triton": [], "opentelemetry": [trace], "log": []}


@pytest.mark.parametrize(
    ("setting", "traceparent", "mode", "is_in_trace", "flag"),
    [
        (ON, SAMPLED, "triton", True, True),
        (ON, UNSAMPLED, "", True, False),
        (None, SAMPLED, "", True, False),
        (None, "", "", False, None),
        (ON, "", "triton", True, True),
    ],
)
def test_the_place_in_the_distributed_trace(
    setting: TraceSetting | None, traceparent: str, mode: str, is_in_trace: bool, flag: bool | None
) -> None:
    trace = Recorder(setting, access_log=True).tracer.begin(a_request(), traceparent, "vendor=x")
    assert trace is not None
    assert trace.mode == mode
    assert (trace.context is not None) == is_in_trace
    if trace.context is not None:
        assert trace.context.sampled == flag
        assert (trace.context.trace_id == TRACE_ID) == bool(traceparent)
        assert trace.context.span_id != PARENT_ID
        assert trace.context.state == ("vendor=x" if traceparent else "")


def test_numbers_count_up() -> None:
    tracer = Recorder(ON).tracer
    traces: list[Any] = [tracer.begin(a_request()) for _ in range(3)]
    assert [trace.number for trace in traces] == [1, 2, 3]
