"""The streams that a client may still name although they are not open. A bounded number is remembered."""

from __future__ import annotations

from collections import OrderedDict, deque

REMEMBERED = 1024
_GAPS = 64


class ClosedStreams:
    """The streams that the server has reset, and those that the client has left out."""

    __slots__ = ("_gaps", "_reset")

    def __init__(self) -> None:
        self._reset: OrderedDict[int, None] = OrderedDict()
        self._gaps: deque[range] = deque(maxlen=_GAPS)

    def __len__(self) -> int:
        return len(self._reset)

    def reset(self, stream_id: int) -> None:
        """Note that the server has reset a stream; the client may not know yet."""
        self._reset[stream_id] = None
        if len(self._reset) > REMEMBERED:
            self._reset.popitem(last=False)

    def is_reset(self, stream_id: int) -> bool:
        """True if the server has reset the stream, and the client may still send frames on it."""
        return stream_id in self._reset

    def end(self, stream_id: int) -> bool:
        """Note that the client has ended a stream; returns False if the server had not reset it, or the client had ended it before."""
        return self._reset.pop(stream_id, 0) is None

    def leave_out(self, ids: range) -> None:
        """Note numbers that the client has left out, which it must not use any more (RFC 9113, section 5.1.1)."""
        self._gaps.append(ids)

    def is_left_out(self, stream_id: int) -> bool:
        """True if the client has left out the number."""
        return any(stream_id in gap for gap in self._gaps)
