"""Trace contexts against the rules of the recommendation and against OpenTelemetry's own reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.telemetry.trace_context import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"

hexadecimal = "0123456789abcdef"
ids = st.tuples(
    st.text(hexadecimal, min_size=32, max_size=32).filter(lambda text: text.strip("0")),
    st.text(hexadecimal, min_size=16, max_size=16).filter(lambda text: text.strip("0")),
)


def theirs(traceparent: str, tracestate: str = "") -> trace.SpanContext:
    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent, "tracestate": tracestate})
    return trace.get_current_span(context).get_span_context()


@given(ids, st.integers(0, 255))
def test_valid_headers_are_read_as_opentelemetry_reads_them(given: tuple[str, str], flags: int) -> None:
    header = f"00-{given[0]}-{given[1]}-{flags:02x}"
    found = TraceContext.parse(header)
    assert found == TraceContext(*given, sampled=bool(flags & 1))
    expected = theirs(header)
    assert (found.trace_id, found.span_id) == (f"{expected.trace_id:032x}", f"{expected.span_id:016x}")
    assert found.sampled == expected.trace_flags.sampled


@given(st.data())
def test_what_is_changed_anywhere_is_refused_or_valid_for_opentelemetry_too(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(VALID)))
    cut = data.draw(st.integers(0, 2))
    changed = VALID[:place] + data.draw(st.text(hexadecimal + "-gA \t\n\x00é٣", max_size=3)) + VALID[place + cut :]
    found = TraceContext.parse(changed)
    if found is not None:
        expected = theirs(changed)
        assert expected.is_valid
        assert (found.trace_id, found.span_id) == (f"{expected.trace_id:032x}", f"{expected.span_id:016x}")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        VALID.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"{VALID}-",
        f"{VALID}-more",
        f" {VALID}",
        f"{VALID}\n",
        f"01-{TRACE}-{SPAN}-01more",
        f"00-{TRACE}-{SPAN}-0",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 1000,
    ],
)
def test_broken_headers_are_ignored(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_a_version_to_come_may_have_more_fields() -> None:
    assert TraceContext.parse(f"cc-{TRACE}-{SPAN}-01-what-may-come") == TraceContext(TRACE, SPAN, sampled=True)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        ("a=1 , \tb=2,,", "a=1,b=2"),
        ("tenant@vendor=x", "tenant@vendor=x"),
        ("1tenant@vendor=x", "1tenant@vendor=x"),
        ("a=1,a=2", ""),
        ("A=1", ""),
        ("1a=x", ""),
        ("a=", ""),
        ("a=b=c", ""),
        ("a=é", ""),
        ("novalue", ""),
        (",".join(f"k{n}=v" for n in range(32)), ",".join(f"k{n}=v" for n in range(32))),
        (",".join(f"k{n}=v" for n in range(33)), ""),
        ("a=" + "x" * 256, "a=" + "x" * 256),
        ("a=" + "x" * 257, ""),
        (",".join("abcdef"[n] + "=" + "x" * 200 for n in range(6)), ""),
    ],
)
def test_states_are_kept_whole_or_dropped(given: str, kept: str) -> None:
    found = TraceContext.parse(VALID, given)
    assert found == TraceContext(TRACE, SPAN, True, kept)


def test_a_child_is_a_new_span_of_the_same_trace() -> None:
    parent = TraceContext(TRACE, SPAN, True, "a=1")
    child = parent.child(sampled=False)
    assert (child.trace_id, child.sampled, child.state) == (TRACE, False, "a=1")
    assert child.span_id != SPAN
    assert TraceContext.parse(child.traceparent, child.state) == child


def test_a_new_trace_is_valid_and_like_no_other() -> None:
    one, other = TraceContext.new(sampled=True), TraceContext.new(sampled=True)
    assert one.trace_id != other.trace_id
    assert TraceContext.parse(one.traceparent) == one
