"""The requirements of RFC 9113 for servers, by section. They include the cases of h2spec (generic and http2).

Each case consists of a client's frames and the expected outcome. ``test_conformance_hpack.py`` has the cases of RFC 7541.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest

from h2_conformance import ECHOED, Expect, alive, answered, ended, ignored, reset, run, silent
from h2_servers import CHAT, ECHO, FLOOD, HOLD, data_frame, message
from h2_wire import Client, Lab, on_loop
from penstock.online.server.h2.session import CONNECTION_WINDOW, MAX_FRAME, STREAM_WINDOW
from penstock.online.server.network.sniffer import PREFACE
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ErrorCode

PROTOCOL, SIZE, FLOW = ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR, ErrorCode.FLOW_CONTROL_ERROR
CLOSED, REFUSED, COMPRESSION = ErrorCode.STREAM_CLOSED, ErrorCode.REFUSED_STREAM, ErrorCode.COMPRESSION_ERROR
END, ALL = h2.END_STREAM, h2.END_HEADERS | h2.END_STREAM
PRIORITY = bytes((0, 0, 0, 0, 15))
WHOLE = message(b"hello")
CANCEL = h2.rst_stream(1, ErrorCode.CANCEL)

Frames = Callable[[Client], Iterable[bytes]]


def half_closed(*frames: bytes) -> Frames:
    """A client whose request is complete but not yet answered continues with ``frames``."""
    return lambda c: (c.request(1, path=HOLD), *frames)


def closed(*frames: bytes) -> Frames:
    """A client whose request has been answered."""
    return lambda c: (c.request(1), b"", *frames)


def cancelled(*frames: bytes) -> Frames:
    """A client that has reset its stream."""
    return lambda c: (c.headers(1), CANCEL, *frames)


def opened(*frames: bytes) -> Frames:
    """A client whose request has begun."""
    return lambda c: (c.headers(1), *frames)


def only(*frames: bytes) -> Frames:
    """A client without streams."""
    return lambda c: frames


def head(flags: int, payload: Callable[[bytes], bytes] = bytes, stream_id: int = 1) -> Frames:
    """HEADERS with a changed payload, and a request's message."""
    return lambda c: (h2.frame(h2.HEADERS, flags, stream_id, payload(c.block())), data_frame(stream_id, WHOLE, END))


def fields(*pairs: tuple[str, str]) -> Frames:
    """A request with these fields, and its message."""

    def frames(c: Client) -> Iterable[bytes]:
        return h2.frame(h2.HEADERS, h2.END_HEADERS, 1, bytes(c.encoder.encode(list(pairs)))), data_frame(1, WHOLE, END)

    return frames


def more(**headers: str | None) -> Frames:
    """A usual request with other ``headers``, and its message."""
    return lambda c: (c.headers(1, **headers), data_frame(1, WHOLE, END))


def trailing(*pairs: tuple[str, str], flags: int = ALL) -> Frames:
    """A request with trailers."""
    return lambda c: (
        c.headers(1),
        data_frame(1, WHOLE),
        h2.frame(h2.HEADERS, flags, 1, bytes(c.encoder.encode(list(pairs)))),
    )


def split(c: Client, *cuts: int, stream_id: int = 1) -> list[bytes]:
    """A request's header block, cut into HEADERS and CONTINUATION."""
    block = c.block()
    bounds = [0, *cuts, len(block)]
    first, *parts, last = (block[start:stop] for start, stop in pairwise(bounds))
    return [
        h2.frame(h2.HEADERS, 0, stream_id, first),
        *(h2.frame(h2.CONTINUATION, 0, stream_id, part) for part in parts),
        h2.frame(h2.CONTINUATION, h2.END_HEADERS, stream_id, last),
    ]


USUAL = ((":method", "POST"), (":scheme", "http"), (":path", ECHO))
KIND = ("content-type", "application/grpc")

CASES: dict[str, tuple[Frames, Expect]] = {
    # 4. Frames
    "4.1 a frame of unknown type is ignored": (only(h2.frame(0x16, 0, 0, bytes(8))), ignored),
    "4.1 a frame of unknown type on a stream is ignored": (opened(h2.frame(0xFE, 0xFF, 1, b"x")), ignored),
    "4.1 undefined flags are ignored": (only(h2.frame(h2.PING, 0x16, 0, b"whatever")), alive),
    "4.1 the reserved bit is ignored": (only(h2.frame(h2.PING, 0, 1 << 31, b"whatever")), alive),
    "4.1 the reserved bit of a stream is ignored": (head(h2.END_HEADERS, stream_id=1 | 1 << 31), answered(1)),
    "4.2 DATA of 2^14 octets": (
        lambda c: (c.headers(1), data_frame(1, message(bytes((1 << 14) - 5)), END)),
        answered(1, content=message(bytes((1 << 14) - 5))),
    ),
    "4.2 DATA of the maximum": (
        lambda c: (
            c.headers(1, CHAT),
            h2.window_update(0, 1 << 24),
            h2.window_update(1, 1 << 24),
            data_frame(1, message(bytes(MAX_FRAME - 5)), END),
        ),
        answered(1, content=message(bytes(MAX_FRAME - 5))),
    ),
    "4.2 DATA beyond the maximum": (opened(data_frame(1, bytes(MAX_FRAME + 1))), ended(SIZE)),
    "4.2 HEADERS beyond the maximum": (only(h2.frame(h2.HEADERS, ALL, 1, bytes(MAX_FRAME + 1))), ended(SIZE)),
    "4.2 SETTINGS beyond the maximum": (only(h2.frame(h2.SETTINGS, 0, 0, bytes(MAX_FRAME + 1))), ended(SIZE)),
    "4.3 a broken header block": (only(h2.frame(h2.HEADERS, ALL, 1, b"\x40")), ended(COMPRESSION)),
    "4.3 PRIORITY within a header block": (
        lambda c: (split(c, 5)[0], h2.frame(h2.PRIORITY, 0, 1, PRIORITY), split(c, 5)[1]),
        ended(PROTOCOL),
    ),
    "4.3 HEADERS of another stream within a header block": (
        lambda c: (split(c, 5)[0], c.headers(3)),
        ended(PROTOCOL),
    ),
    "4.3 a block of a refused request changes the table": (
        lambda c: (c.headers(1, "/none", x_1="a"), c.headers(3, x_1="a"), data_frame(3, WHOLE, END)),
        answered(3),
    ),
    # 5.1 Stream states
    "5.1 idle: DATA": (only(data_frame(1, b"test", END)), ended(PROTOCOL)),
    "5.1 idle: RST_STREAM": (only(CANCEL), ended(PROTOCOL)),
    "5.1 idle: WINDOW_UPDATE": (only(h2.window_update(1, 100)), ended(PROTOCOL)),
    "5.1 idle: CONTINUATION": (only(h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, b"\x82")), ended(PROTOCOL)),
    "5.1 idle: PRIORITY": (only(h2.frame(h2.PRIORITY, 0, 1, PRIORITY)), ignored),
    "5.1 half-closed (remote): DATA": (half_closed(data_frame(1, b"test", END)), reset(1, CLOSED)),
    "5.1 half-closed (remote): HEADERS": (
        lambda c: (c.request(1, path=HOLD), c.headers(1)),
        reset(1, CLOSED),
    ),
    "5.1 half-closed (remote): CONTINUATION": (
        half_closed(h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, b"\x82")),
        ended(CLOSED, PROTOCOL),
    ),
    "5.1 half-closed (remote): WINDOW_UPDATE": (half_closed(h2.window_update(1, 100)), silent(1)),
    "5.1 half-closed (remote): PRIORITY": (half_closed(h2.frame(h2.PRIORITY, 0, 1, PRIORITY)), silent(1)),
    "5.1 half-closed (remote): RST_STREAM": (half_closed(CANCEL), silent(1)),
    "5.1 closed by RST_STREAM: DATA": (cancelled(data_frame(1, b"test", END)), reset(1, CLOSED)),
    "5.1 closed by RST_STREAM: HEADERS": (lambda c: (c.headers(1), CANCEL, c.headers(1)), ended(CLOSED)),
    "5.1 closed by RST_STREAM: CONTINUATION": (
        cancelled(h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, b"\x82")),
        ended(CLOSED, PROTOCOL),
    ),
    "5.1 closed by RST_STREAM: PRIORITY": (cancelled(h2.frame(h2.PRIORITY, 0, 1, PRIORITY)), silent(1)),
    "5.1 closed by RST_STREAM: RST_STREAM": (cancelled(CANCEL), silent(1)),
    "5.1 closed by END_STREAM: DATA": (closed(data_frame(1, b"test", END)), reset(1, CLOSED)),
    "5.1 closed by END_STREAM: HEADERS": (lambda c: (c.request(1), b"", c.headers(1)), ended(CLOSED)),
    "5.1 closed by END_STREAM: CONTINUATION": (
        closed(h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, b"\x82")),
        ended(CLOSED, PROTOCOL),
    ),
    "5.1 closed by END_STREAM: PRIORITY": (closed(h2.frame(h2.PRIORITY, 0, 1, PRIORITY)), answered(1)),
    "5.1 closed by END_STREAM: WINDOW_UPDATE": (closed(h2.window_update(1, 100)), answered(1)),
    "5.1 closed by END_STREAM: RST_STREAM": (closed(CANCEL), answered(1)),
    "5.1 closed by the server: frames on their way are ignored": (
        lambda c: (
            c.headers(1, te="gzip"),
            data_frame(1, bytes(1000)),
            h2.window_update(1, 5),
            data_frame(1, b"", END),
        ),
        reset(1, PROTOCOL),
    ),
    "5.1.1 an even stream": (lambda c: (c.headers(2),), ended(PROTOCOL)),
    "5.1.1 a stream below an earlier one": (lambda c: (c.request(5), c.headers(3)), ended(PROTOCOL)),
    "5.1.1 numbers may be left out": (lambda c: (c.request(5), c.request(99)), answered(5, 99)),
    "5.1.2 more streams than allowed": (
        lambda c: [c.request(2 * n + 1, path=HOLD) for n in range(9)],
        reset(17, REFUSED, PROTOCOL, is_full=True),
    ),
    "5.1.2 ended streams do not count": (
        lambda c: [
            frame for n in range(20) for frame in (c.headers(2 * n + 1), h2.rst_stream(2 * n + 1, ErrorCode.CANCEL))
        ],
        ignored,
    ),
    "5.2 DATA beyond the window of a stream": (
        lambda c: (
            c.headers(3, CHAT),
            data_frame(3, message(b"pause")),
            *[data_frame(3, bytes(MAX_FRAME))] * (STREAM_WINDOW // MAX_FRAME),
        ),
        reset(3, FLOW),
    ),
    "5.3.1 HEADERS that depend on their own stream": (
        head(h2.END_HEADERS | h2.PRIORITISED, lambda block: bytes((0, 0, 0, 1, 15)) + block),
        reset(1, PROTOCOL),
    ),
    "5.3.1 PRIORITY that depends on its own stream": (
        opened(h2.frame(h2.PRIORITY, 0, 1, bytes((0, 0, 0, 1, 15)))),
        reset(1, PROTOCOL),
    ),
    "5.3.1 PRIORITY of an idle stream that depends on itself": (
        only(h2.frame(h2.PRIORITY, 0, 1, bytes((0, 0, 0, 1, 15)))),
        ended(PROTOCOL),
    ),
    "5.3.2 PRIORITY of an idle stream, and HEADERS of a lower one": (
        lambda c: (h2.frame(h2.PRIORITY, 0, 5, PRIORITY), c.request(1)),
        answered(1),
    ),
    "5.3.2 an exclusive dependency": (
        lambda c: (c.headers(1), h2.frame(h2.PRIORITY, 0, 1, bytes((0x80, 0, 0, 5, 255))), data_frame(1, WHOLE, END)),
        answered(1),
    ),
    # 5.4 Errors
    "5.4.1 an error ends the connection with the last stream": (
        lambda c: (c.request(1), c.request(3), h2.frame(h2.PING, 0, 1, bytes(8))),
        ended(PROTOCOL, last=3),
    ),
    "5.4.1 nothing after the error is handled": (
        lambda c: (h2.frame(h2.PING, 0, 0, bytes(6)) + c.request(1),),
        ended(SIZE, last=0),
    ),
    "5.4.2 an error of a stream leaves the others": (
        lambda c: (c.headers(1), c.headers(3), h2.window_update(1, 0), data_frame(3, WHOLE, END)),
        answered(3),
    ),
    "5.5 a frame of unknown type within a header block": (
        lambda c: (split(c, 5)[0], h2.frame(0x16, 0, 1, bytes(8)), split(c, 5)[1]),
        ended(PROTOCOL),
    ),
    # 6.1 DATA
    "6.1 DATA": (lambda c: (c.request(1),), answered(1)),
    "6.1 DATA in several frames": (
        lambda c: (c.headers(1), data_frame(1, WHOLE[:3]), data_frame(1, WHOLE[3:7]), data_frame(1, WHOLE[7:], END)),
        answered(1),
    ),
    "6.1 an empty last frame": (opened(data_frame(1, WHOLE), data_frame(1, b"", END)), answered(1)),
    "6.1 with padding": (opened(data_frame(1, b"\x08" + WHOLE + bytes(8), END | h2.PADDED)), answered(1)),
    "6.1 with padding of no length": (opened(data_frame(1, b"\0" + WHOLE, END | h2.PADDED)), answered(1)),
    "6.1 with padding only": (
        opened(data_frame(1, WHOLE), data_frame(1, b"\xff" + bytes(255), END | h2.PADDED)),
        answered(1),
    ),
    "6.1 on stream 0": (only(data_frame(0, b"test")), ended(PROTOCOL)),
    "6.1 padding as long as the frame": (opened(data_frame(1, b"\x05test", END | h2.PADDED)), ended(PROTOCOL)),
    "6.1 no length of the padding": (opened(data_frame(1, b"", END | h2.PADDED)), ended(SIZE)),
    # 6.2 HEADERS
    "6.2 HEADERS": (head(h2.END_HEADERS), answered(1)),
    "6.2 with padding": (head(h2.END_HEADERS | h2.PADDED, lambda block: b"\x08" + block + bytes(8)), answered(1)),
    "6.2 with priority": (head(h2.END_HEADERS | h2.PRIORITISED, lambda block: PRIORITY + block), answered(1)),
    "6.2 with padding and priority": (
        head(h2.END_HEADERS | h2.PADDED | h2.PRIORITISED, lambda block: b"\x03" + PRIORITY + block + bytes(3)),
        answered(1),
    ),
    "6.2 followed by PRIORITY before their end": (
        lambda c: (split(c, 5)[0], h2.frame(h2.PRIORITY, 0, 1, PRIORITY)),
        ended(PROTOCOL),
    ),
    "6.2 followed by HEADERS of another stream before their end": (
        lambda c: (split(c, 5)[0], c.headers(3)),
        ended(PROTOCOL),
    ),
    "6.2 on stream 0": (lambda c: (c.headers(0),), ended(PROTOCOL)),
    "6.2 padding beyond the frame": (
        head(h2.END_HEADERS | h2.PADDED, lambda block: bytes((len(block) + 2,)) + block),
        ended(PROTOCOL),
    ),
    "6.2 no length of the padding": (head(h2.END_HEADERS | h2.PADDED, lambda block: b""), ended(SIZE)),
    "6.2 too short for their priority": (
        head(h2.END_HEADERS | h2.PRIORITISED, lambda block: b"\0\0"),
        ended(PROTOCOL, SIZE),
    ),
    # 6.3 PRIORITY
    "6.3 of weight 1": (opened(h2.frame(h2.PRIORITY, 0, 1, bytes(5)), data_frame(1, WHOLE, END)), answered(1)),
    "6.3 of weight 256": (
        opened(h2.frame(h2.PRIORITY, 0, 1, bytes(4) + b"\xff"), data_frame(1, WHOLE, END)),
        answered(1),
    ),
    "6.3 on stream 0": (only(h2.frame(h2.PRIORITY, 0, 0, PRIORITY)), ended(PROTOCOL)),
    "6.3 of another length": (opened(h2.frame(h2.PRIORITY, 0, 1, bytes(4))), reset(1, SIZE)),
    "6.3 of another length on an idle stream": (only(h2.frame(h2.PRIORITY, 0, 1, bytes(6))), ended(SIZE)),
    # 6.4 RST_STREAM
    "6.4 RST_STREAM": (opened(CANCEL), silent(1)),
    "6.4 on stream 0": (only(h2.rst_stream(0, ErrorCode.CANCEL)), ended(PROTOCOL)),
    "6.4 on an idle stream": (only(CANCEL), ended(PROTOCOL)),
    "6.4 of another length": (opened(h2.frame(h2.RST_STREAM, 0, 1, bytes(3))), ended(SIZE)),
    # 6.5 SETTINGS
    "6.5 an ACK with a payload": (only(h2.frame(h2.SETTINGS, h2.ACK, 0, bytes(6))), ended(SIZE)),
    "6.5 on a stream": (only(h2.frame(h2.SETTINGS, 0, 1, bytes(6))), ended(PROTOCOL)),
    "6.5 of another length": (only(h2.frame(h2.SETTINGS, 0, 0, bytes(3))), ended(SIZE)),
    "6.5.2 HEADER_TABLE_SIZE": (only(h2.settings({h2.HEADER_TABLE_SIZE: 0})), ignored),
    "6.5.2 ENABLE_PUSH": (only(h2.settings({h2.ENABLE_PUSH: 1}), h2.settings({h2.ENABLE_PUSH: 0})), ignored),
    "6.5.2 ENABLE_PUSH of 2": (only(h2.settings({h2.ENABLE_PUSH: 2})), ended(PROTOCOL)),
    "6.5.2 INITIAL_WINDOW_SIZE": (only(h2.settings({h2.INITIAL_WINDOW_SIZE: h2.MAX_WINDOW})), ignored),
    "6.5.2 INITIAL_WINDOW_SIZE of 2^31": (only(h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 31})), ended(FLOW)),
    "6.5.2 MAX_FRAME_SIZE": (
        only(h2.settings({h2.MAX_FRAME_SIZE: 1 << 14}), h2.settings({h2.MAX_FRAME_SIZE: (1 << 24) - 1})),
        ignored,
    ),
    "6.5.2 MAX_FRAME_SIZE below 2^14": (only(h2.settings({h2.MAX_FRAME_SIZE: (1 << 14) - 1})), ended(PROTOCOL)),
    "6.5.2 MAX_FRAME_SIZE of 2^24": (only(h2.settings({h2.MAX_FRAME_SIZE: 1 << 24})), ended(PROTOCOL)),
    "6.5.2 MAX_CONCURRENT_STREAMS and MAX_HEADER_LIST_SIZE": (
        only(h2.settings({h2.MAX_CONCURRENT_STREAMS: 0, h2.MAX_HEADER_LIST_SIZE: 0})),
        ignored,
    ),
    "6.5.2 an unknown identifier": (only(h2.settings({0xFF: 1})), ignored),
    # 6.6 PUSH_PROMISE; 6.7 PING; 6.8 GOAWAY
    "6.6 PUSH_PROMISE": (opened(h2.frame(h2.PUSH_PROMISE, h2.END_HEADERS, 1, bytes((0, 0, 0, 2)))), ended(PROTOCOL)),
    "6.7 PING": (only(), alive),
    "6.7 on a stream": (only(h2.frame(h2.PING, 0, 1, bytes(8))), ended(PROTOCOL)),
    "6.7 of another length": (only(h2.frame(h2.PING, 0, 0, bytes(6))), ended(SIZE)),
    "6.8 GOAWAY": (only(h2.goaway(0, ErrorCode.NO_ERROR)), ignored),
    "6.8 on a stream": (only(h2.frame(h2.GOAWAY, 0, 1, bytes(8))), ended(PROTOCOL)),
    "6.8 too short": (only(h2.frame(h2.GOAWAY, 0, 0, bytes(7))), ended(SIZE)),
    # 6.9 WINDOW_UPDATE
    "6.9 of the connection": (only(h2.window_update(0, 1)), ignored),
    "6.9 of a stream": (opened(h2.window_update(1, 1)), ignored),
    "6.9 of 0": (only(h2.window_update(0, 0)), ended(PROTOCOL)),
    "6.9 of 0 for a stream": (opened(h2.window_update(1, 0)), reset(1, PROTOCOL)),
    "6.9 of another length": (only(h2.frame(h2.WINDOW_UPDATE, 0, 0, bytes(3))), ended(SIZE)),
    "6.9.1 a window beyond 2^31 - 1": (only(*[h2.window_update(0, h2.MAX_WINDOW)] * 2), ended(FLOW)),
    "6.9.1 a window of a stream beyond 2^31 - 1": (opened(*[h2.window_update(1, h2.MAX_WINDOW)] * 2), reset(1, FLOW)),
    "6.9.2 a window that the setting makes too large": (
        opened(h2.window_update(1, h2.MAX_WINDOW - h2.DEFAULT_WINDOW), h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 16})),
        ended(FLOW),
    ),
    # 6.10 CONTINUATION
    "6.10 CONTINUATION": (lambda c: (*split(c, 5), data_frame(1, WHOLE, END)), answered(1)),
    "6.10 several": (lambda c: (*split(c, 1, 1, 5, 9), data_frame(1, WHOLE, END)), answered(1)),
    "6.10 followed by another frame": (lambda c: (*split(c, 3, 5)[:2], data_frame(1, b"test")), ended(PROTOCOL)),
    "6.10 on stream 0": (
        lambda c: (split(c, 5)[0], h2.frame(h2.CONTINUATION, h2.END_HEADERS, 0, split(c, 5)[1][9:])),
        ended(PROTOCOL),
    ),
    "6.10 on another stream": (lambda c: (split(c, 5)[0], split(c, 5, stream_id=3)[1]), ended(PROTOCOL)),
    "6.10 after HEADERS that have ended": (
        lambda c: (c.headers(1), h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, b"\x82")),
        ended(PROTOCOL),
    ),
    "6.10 after CONTINUATION that has ended": (
        lambda c: (*split(c, 5), h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, b"\x82")),
        ended(PROTOCOL),
    ),
    "6.10 after DATA": (
        opened(data_frame(1, b"test"), h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, b"\x82")),
        ended(PROTOCOL),
    ),
    # 7. Error codes
    "7 GOAWAY with an unknown code": (only(h2.frame(h2.GOAWAY, 0, 0, bytes(4) + b"\0\0\0\xff")), ignored),
    "7 RST_STREAM with an unknown code": (opened(h2.frame(h2.RST_STREAM, 0, 1, b"\0\0\0\xff")), silent(1)),
    # 8. HTTP
    "8.1 a second HEADERS that does not end the request": (
        lambda c: (c.headers(1), c.headers(1), data_frame(1, WHOLE, END)),
        reset(1, PROTOCOL),
    ),
    "8.1 trailers": (trailing(("x-sum", "1")), answered(1)),
    "8.1 trailers that do not end the request": (trailing(("x-sum", "1"), flags=h2.END_HEADERS), reset(1, PROTOCOL)),
    "8.1 trailers with a pseudo-header": (trailing((":method", "POST")), reset(1, PROTOCOL)),
    "8.1.1 content-length": (more(content_length=str(len(WHOLE))), answered(1)),
    "8.1.1 content-length that differs": (more(content_length="1"), reset(1, PROTOCOL)),
    "8.1.1 content-length that differs, over several frames": (
        lambda c: (c.headers(1, content_length="20"), data_frame(1, WHOLE[:5]), data_frame(1, WHOLE[5:], END)),
        reset(1, PROTOCOL),
    ),
    "8.1.1 content-length without content": (
        lambda c: (c.headers(1, flags=ALL, content_length="5"),),
        reset(1, PROTOCOL),
    ),
    "8.1.1 content-length twice": (
        fields(*USUAL, KIND, ("content-length", "10"), ("content-length", "11")),
        reset(1, PROTOCOL),
    ),
    "8.1.1 content-length that is no number": (more(content_length="+10"), reset(1, PROTOCOL)),
    "8.2 a name with an upper-case letter": (fields(*USUAL, KIND, ("X-Test", "1")), reset(1, PROTOCOL)),
    **{
        f"8.2.1 a name with {character!r}": (fields(*USUAL, KIND, (f"x{character}y", "1")), reset(1, PROTOCOL))
        for character in ("\0", "\n", " ", ":", "\x7f", "é")
    },
    "8.2.1 a name without characters": (fields(*USUAL, KIND, ("", "1")), reset(1, PROTOCOL)),
    **{
        f"8.2.1 the value {value!r}": (fields(*USUAL, KIND, ("x", value)), reset(1, PROTOCOL))
        for value in ("a\0b", "a\nb", "a\rb", " a", "a ", "\ta")
    },
    "8.2.1 other values": (fields(*USUAL, KIND, ("x", ""), ("y", "a b\tc"), ("z", "é:=")), answered(1)),
    **{
        f"8.2.2 {name}": (fields(*USUAL, KIND, (name, value)), reset(1, PROTOCOL))
        for name, value in (
            ("connection", "keep-alive"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("te", "trailers, deflate"),
        )
    },
    "8.2.2 te: trailers": (more(te="trailers"), answered(1)),
    "8.3 an unknown pseudo-header": (fields(*USUAL, (":test", "1"), KIND), reset(1, PROTOCOL)),
    "8.3 a pseudo-header of answers": (fields(*USUAL, (":status", "200"), KIND), reset(1, PROTOCOL)),
    "8.3 a pseudo-header after another field": (fields(*USUAL[:2], KIND, USUAL[2]), reset(1, PROTOCOL)),
    **{f"8.3 {pair[0]} twice": (fields(pair, *USUAL, KIND), reset(1, PROTOCOL)) for pair in USUAL},
    **{
        f"8.3.1 no {pair[0]}": (fields(*(each for each in USUAL if each != pair), KIND), reset(1, PROTOCOL))
        for pair in USUAL
    },
    "8.3.1 an empty :path": (fields(*USUAL[:2], (":path", ""), KIND), reset(1, PROTOCOL)),
    "8.3.1 :authority": (fields(*USUAL, (":authority", "host:1"), KIND), answered(1)),
    "8.7 a refused stream may be asked for again": (
        lambda c: (*(c.headers(2 * n + 1, HOLD) for n in range(9)), CANCEL, c.request(19)),
        answered(19),
    ),
}


@pytest.mark.parametrize(("frames", "expect"), CASES.values(), ids=CASES.keys())
def test_rfc_9113(frames: Frames, expect: Expect) -> None:
    run(frames, expect)


def test_3_4_the_preface() -> None:
    async def main() -> None:
        lab = Lab()
        for cut in (len(PREFACE) + 9, 10, 1):
            client = lab.open()
            hello = PREFACE + h2.settings({})
            for start in range(0, len(hello), cut):
                client.connection.data_received(hello[start : start + cut])
            client.send(client.request(1))
            await lab.settle()
            first, *others = client.frames()
            assert (first.kind, first.flags, first.stream_id) == (h2.SETTINGS, 0, 0)
            assert (h2.SETTINGS, h2.ACK) in [(frame.kind, frame.flags) for frame in others]
            answered(1)(client)

    on_loop(main)


@pytest.mark.parametrize(
    "hello", [b"INVALID CONNECTION PREFACE\r\n\r\n", PREFACE[:-1] + b"x", PREFACE + h2.ping(bytes(8))]
)
def test_3_4_another_preface(hello: bytes) -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.open()
        client.connection.data_received(hello)
        await lab.settle()
        ended(PROTOCOL)(client)

    on_loop(main)


def test_6_5_3_settings_are_acknowledged_in_order() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        client.send(h2.ping(b"before.."), h2.settings({}), h2.ping(b"between."), h2.settings({}), h2.ping(b"after..."))
        await lab.settle()
        kinds = [frame.kind for frame in client.frames() if frame.flags & h2.ACK]
        assert kinds == [h2.SETTINGS, h2.PING, h2.SETTINGS, h2.PING, h2.SETTINGS, h2.PING]

    on_loop(main)


def test_6_5_3_of_repeated_settings_the_last_counts() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        both = h2.SETTING.pack(h2.INITIAL_WINDOW_SIZE, 100) + h2.SETTING.pack(h2.INITIAL_WINDOW_SIZE, 1)
        client.send(h2.frame(h2.SETTINGS, 0, 0, both), client.request(1))
        await lab.settle()
        assert [frame.payload for frame in client.of(h2.DATA)] == [ECHOED[:1]]

    on_loop(main)


def test_6_7_the_answer_has_the_same_content_and_is_not_answered() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        client.send(h2.ping(b"h2spec..", h2.ACK), h2.ping(b"12345678"))
        await lab.settle()
        assert [(frame.flags, frame.payload) for frame in client.of(h2.PING)] == [(h2.ACK, b"12345678")]

    on_loop(main)


@pytest.mark.parametrize("size", [0, 1, 9])
def test_6_9_1_answers_keep_within_the_window_of_their_stream(size: int) -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect(initial_window_size=size)
        client.send(client.request(1))
        await lab.settle()
        assert b"".join(frame.payload for frame in client.of(h2.DATA)) == ECHOED[:size]
        client.send(*(h2.window_update(1, 1) for _ in range(len(ECHOED) - size)))
        await lab.settle()
        answered(1)(client)

    on_loop(main)


def test_6_9_1_answers_keep_within_the_window_of_the_connection() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect(initial_window_size=1 << 24)
        client.send(client.request(1, b"2", FLOOD))
        await lab.settle()
        assert sum(len(frame.payload) for frame in client.of(h2.DATA)) == h2.DEFAULT_WINDOW

    on_loop(main)


def test_6_9_2_a_changed_setting_changes_the_windows_of_open_streams() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect(initial_window_size=0)
        client.send(client.request(1))
        for size, sent in ((3, 3), (2, 3), (3, 3), (5, 5), (0, 5)):
            client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: size}))
            await lab.settle()
            assert b"".join(frame.payload for frame in client.of(h2.DATA)) == ECHOED[:sent]
        client.send(h2.window_update(1, 5))  # to 0: it was negative
        await lab.settle()
        assert b"".join(frame.payload for frame in client.of(h2.DATA)) == ECHOED[:5]
        client.send(h2.window_update(1, 5))
        await lab.settle()
        answered(1)(client)

    on_loop(main)


def test_6_9_padding_and_refused_data_take_of_the_window_of_the_connection_and_are_given_back() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        padded = data_frame(3, b"\xff" + bytes(10_255), h2.PADDED)
        client.send(client.headers(1), CANCEL, client.headers(3, "/none"), padded * (CONNECTION_WINDOW // 10_256 + 1))
        await lab.settle()
        given = [h2.UINT32.unpack(frame.payload)[0] for frame in client.of(h2.WINDOW_UPDATE) if not frame.stream_id]
        assert sum(given) > CONNECTION_WINDOW
        assert client.goaway is None

    on_loop(main)


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [("GET", None, b"415"), ("HEAD", None, b"415"), ("POST", "application/json", b"415"), ("PUT", KIND[1], b"405")],
)
def test_8_1_a_request_that_is_not_grpc_is_answered_with_a_text(
    method: str, headers: str | None, status: bytes
) -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        head = client.headers(1, "/v2/health/ready", ALL, **{":method": method, "content-type": headers})
        client.send(head)
        await lab.settle()
        answer = [frame for frame in client.frames() if frame.stream_id == 1]
        assert b":status\x03" + status in answer[0].payload
        assert bool(answer[-1].flags & END)
        assert len(answer) == (1 if method == "HEAD" else 2)
        if status == b"415" and method != "HEAD":
            assert b"'curl --http1.1'" in answer[1].payload

    on_loop(main)


def test_8_1_the_text_keeps_within_the_windows() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect(initial_window_size=10)
        client.send(client.headers(1, "/", ALL, **{":method": "GET", "content-type": None}))
        await lab.settle()
        (answer,) = [frame for frame in client.frames() if frame.stream_id == 1]
        assert (answer.kind, bool(answer.flags & END)) == (h2.HEADERS, True)

    on_loop(main)
