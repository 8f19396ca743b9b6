"""Traces as a server records them, for tests of what they are sent to."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.telemetry.statistics import BatchTimes, Reason
from penstock.telemetry.trace_context import TraceContext
from penstock.telemetry.tracing import Trace

US = 1000
T = 5 * 10**15
TRACE_ID, PARENT_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "53995c3f42cd8ad8"

_TRACE = Trace(
    number=1,
    mode="triton",
    parent=None,
    context=None,
    model_name="m",
    model_version="3",
    request_id="a",
    client="shop",
    bytes_in=12,
    started_ns=T,
    times=BatchTimes(T + 60 * US, T + 61 * US, T + 81 * US, T + 84 * US),
    batch_rows=5,
    reason=Reason.IDLE,
    bytes_out=8,
    ended_ns=T + 110 * US,
)


def a_trace(**changes: Any) -> Trace:
    """A request that was computed, with ``changes``."""
    return msgspec.structs.replace(_TRACE, **changes)


def in_a_distributed_trace(**changes: Any) -> Trace:
    """The same, asked for by somebody who traces it."""
    parent = TraceContext(TRACE_ID, PARENT_ID, sampled=True, state="vendor=x")
    return a_trace(parent=parent, context=TraceContext(TRACE_ID, SPAN_ID, True, "vendor=x"), **changes)
