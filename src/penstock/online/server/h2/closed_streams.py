"""Remembers streams that are not open, because a client may still send frames on them. The number of these streams is limited."""

from __future__ import annotations

from collections import OrderedDict, deque

REMEMBERED = 1024
_GAPS = 64


class ClosedStreams:
    """The streams that the server has reset, and the stream ids that the client has skipped."""

    __slots__ = ("_gaps", "_reset")

    def __init__(self) -> None:
        self._reset: OrderedDict[int, None] = OrderedDict()
        self._gaps: deque[range] = deque(maxlen=_GAPS)

    def __len__(self) -> int:
        return len(self._reset)

    def reset(self, stream_id: int) -> None:
        """Record that the server has reset a stream. The client may not have noticed yet."""
        self._reset[stream_id] = None
        if len(self._reset) > REMEMBERED:
            self._reset.popitem(last=False)

    def is_reset(self, stream_id: int) -> bool:
        """True if the server has reset the stream, and the client may still send frames on it."""
        return stream_id in self._reset

    def end(self, stream_id: int) -> bool:
        """Record that the client has ended a stream. Returns True if the server had reset it and the client had not ended it yet."""
        return self._reset.pop(stream_id, 0) is None

    def leave_out(self, ids: range) -> None:
        """Record stream ids that the client has skipped. The client must not use them later (RFC 9113, section 5.1.1)."""
        self._gaps.append(ids)

    def is_left_out(self, stream_id: int) -> bool:
        """True if the client has skipped the stream id."""
        return any(stream_id in gap for gap in self._gaps)
