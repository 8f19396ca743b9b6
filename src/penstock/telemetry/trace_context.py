"""The W3C trace context: ``traceparent`` and ``tracestate``, as defined in https://www.w3.org/TR/trace-context/ (level 1).

An invalid ``traceparent`` is ignored, and a new trace begins. If only ``tracestate`` is invalid, only ``tracestate`` is ignored.
"""

from __future__ import annotations

import random
import re
from typing import Self

import msgspec

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_BYTES = 512
"""Longer headers are ignored."""

_MAX_MEMBERS = 32
_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_MEMBER = re.compile(_KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")

_random = random.SystemRandom()


class TraceContext(msgspec.Struct, frozen=True):
    """A position in a distributed trace: the id of the trace, and the id of the span that is the parent of new spans."""

    trace_id: str
    """32 lower-case hexadecimal digits, not all zero."""
    span_id: str
    """16 lower-case hexadecimal digits, not all zero."""
    sampled: bool
    """True if the caller records the trace."""
    state: str = ""
    """``tracestate``: data of other systems, passed on unchanged."""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> Self | None:
        """Parse the headers; None if ``traceparent`` is not valid."""
        if len(traceparent) > _MAX_BYTES:
            return None
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None:
            return None
        version, trace_id, span_id, flags, rest = found.groups()
        # Later versions may append fields. Version 00 has none, and ff is invalid.
        if version == "ff" or (version == "00" and rest) or not trace_id.strip("0") or not span_id.strip("0"):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & 1), _valid_state(tracestate))

    @classmethod
    def new(cls, sampled: bool) -> Self:
        """The root of a new trace."""
        return cls(f"{_random.getrandbits(128) or 1:032x}", f"{_random.getrandbits(64) or 1:016x}", sampled)

    def child(self, sampled: bool) -> TraceContext:
        """A new child span of this span, in the same trace."""
        return TraceContext(self.trace_id, f"{_random.getrandbits(64) or 1:016x}", sampled, self.state)

    @property
    def traceparent(self) -> str:
        """The header that propagates this position."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def _valid_state(text: str) -> str:
    """``text`` if it is a valid list of at most 32 members with different keys; otherwise an empty string."""
    if not text or len(text) > _MAX_BYTES:
        return ""
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]
    keys = {member.partition("=")[0] for member in members}
    is_valid = len(members) == len(keys) <= _MAX_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return ",".join(members) if is_valid else ""
