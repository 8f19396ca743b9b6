"""HTTP/2 frame by frame: the requirements of RFC 9113 for servers, and the limits on the cost of a client."""

import gzip
import itertools
import socket
import struct
from collections.abc import Iterator

import pytest

from h2_servers import (
    BREAK,
    CHAT,
    ECHO,
    FAIL,
    FLOOD,
    FLOOD_BYTES,
    HOLD,
    OPEN_BYTES,
    PATIENCE_S,
    GrpcServer,
    Peer,
    data_frame,
    message,
)
from http_servers import LOOPS
from penstock.online.server.h2.guard import BURST, CALL
from penstock.online.server.h2.session import CONNECTION_WINDOW, INCLUDED_BYTES, MAX_FRAME, STREAM_BYTES, STREAM_WINDOW
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ErrorCode


@pytest.fixture(scope="module", params=sorted(LOOPS))
def server(request: pytest.FixtureRequest) -> Iterator[GrpcServer]:
    with GrpcServer(request.param, max_streams=8, max_request_bytes=6_000_000, max_unsent_bytes=1_000_000) as server:
        yield server


@pytest.fixture
def peer(server: GrpcServer) -> Iterator[Peer]:
    """A client. After the test, the fixture checks that the server still answers other clients."""
    with Peer(server.address) as peer:
        peer.greet()
        yield peer
    with Peer(server.address) as other:
        other.greet()
        assert other.ask(1).messages == [b"hello"]


def test_unary_calls(peer: Peer) -> None:
    for stream_id in (1, 3, 9):  # numbers may be skipped
        answer = peer.ask(stream_id, b"x" * stream_id)
        assert answer.headers == {":status": "200", "content-type": "application/grpc"}
        assert (answer.messages, answer.status) == ([b"x" * stream_id], 0)
    assert peer.ask(11, b"").messages == [b""]


def test_interleaved_and_out_of_order(peer: Peer) -> None:
    peer.send(peer.headers(1), peer.headers(3), peer.headers(5))
    whole = message(b"abcdef")
    for start in range(0, len(whole), 4):
        for stream_id in (5, 1, 3):
            peer.send(data_frame(stream_id, whole[start : start + 4]))
    for stream_id in (3, 1, 5):
        peer.send(data_frame(stream_id, b"", h2.END_STREAM))
        assert peer.answer(stream_id).messages == [b"abcdef"]


def test_continuation_padding_and_priority(peer: Peer) -> None:
    block = peer.block(x_long="y" * 300)
    pieces = [block[:10], block[10:11], b"", block[11:]]
    padded = b"\x07" + b"\0\0\0\0\x10" + pieces[0] + bytes(7)
    peer.send(
        h2.frame(h2.HEADERS, h2.PADDED | h2.PRIORITISED, 1, padded),
        h2.frame(h2.CONTINUATION, 0, 1, pieces[1]),
        h2.frame(h2.CONTINUATION, 0, 1, pieces[2]),
        h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, pieces[3]),
        h2.frame(h2.PRIORITY, 0, 1, b"\0\0\0\0\x10"),
        h2.frame(h2.PRIORITY, 0, 99, b"\0\0\0\0\x10"),
        data_frame(1, b"\x03" + message(b"hello")[:6] + bytes(3), h2.PADDED),
        data_frame(1, b"\xff" + message(b"hello")[6:] + bytes(255), h2.PADDED | h2.END_STREAM),
    )
    assert peer.answer(1).messages == [b"hello"]


def test_trailers_end_a_request(peer: Peer) -> None:
    trailers = bytes(peer.encoder.encode([("checksum", "1")]))
    peer.send(peer.headers(1), data_frame(1, message(b"a")))
    peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, trailers))
    assert peer.answer(1).messages == [b"a"]
    peer.send(peer.headers(3), h2.frame(h2.HEADERS, h2.END_HEADERS, 3, trailers))
    assert peer.reset(3) == ErrorCode.PROTOCOL_ERROR


def test_ping_and_settings_are_answered_and_unknown_frames_ignored(peer: Peer) -> None:
    greeting = dict(struct.iter_unpack(">HI", next(peer.frames(h2.SETTINGS)).payload))
    assert greeting[h2.MAX_CONCURRENT_STREAMS] == 8
    peer.send(
        h2.frame(0xBE, 0xFF, 7, b"what"),
        h2.ping(b"12345678"),
        h2.ping(b"87654321", h2.ACK),
        h2.settings({h2.ENABLE_PUSH: 0, 0x9999: 5}),
    )
    frames = [peer.frame() for _ in range(4)]
    assert [(each.kind, each.flags) for each in frames] == [
        (h2.WINDOW_UPDATE, 0),
        (h2.SETTINGS, h2.ACK),
        (h2.PING, h2.ACK),
        (h2.SETTINGS, h2.ACK),
    ]
    assert frames[2].payload == b"12345678"
    assert peer.ask(1).status == 0


BAD = ErrorCode.PROTOCOL_ERROR
SIZE = ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (data_frame(0, b"x"), BAD),
        (data_frame(7, b"x"), BAD),
        (data_frame(1, b"", h2.PADDED), SIZE),
        (data_frame(1, b"\x05abcd", h2.PADDED), BAD),
        (h2.frame(h2.HEADERS, h2.END_HEADERS, 0, b"\x82"), BAD),
        (h2.frame(h2.HEADERS, h2.END_HEADERS, 4, b"\x82"), BAD),
        (h2.frame(h2.HEADERS, h2.END_HEADERS | h2.PADDED, 3, b""), SIZE),
        (h2.frame(h2.HEADERS, h2.END_HEADERS | h2.PADDED, 3, b"\x09\x82"), BAD),
        (h2.frame(h2.HEADERS, h2.END_HEADERS | h2.PRIORITISED, 3, b"\0\0"), BAD),
        (h2.frame(h2.HEADERS, h2.END_HEADERS, 3, b"\xff\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (h2.frame(h2.HEADERS, h2.END_HEADERS, 3, b"\xc9"), ErrorCode.COMPRESSION_ERROR),
        (h2.frame(h2.HEADERS, h2.END_HEADERS, 3, b"\x3f\xff\xff\x0f"), ErrorCode.COMPRESSION_ERROR),
        (h2.frame(h2.HEADERS, 0, 3, b"") + h2.ping(bytes(8)), BAD),
        (h2.frame(h2.HEADERS, 0, 3, b"") + h2.frame(h2.CONTINUATION, 0, 5, b""), BAD),
        (h2.frame(h2.HEADERS, 0, 3, b"") + data_frame(3, b""), BAD),
        (h2.frame(h2.CONTINUATION, h2.END_HEADERS, 3, b""), BAD),
        (h2.frame(h2.PRIORITY, 0, 0, bytes(5)), BAD),
        (h2.frame(h2.RST_STREAM, 0, 0, bytes(4)), BAD),
        (h2.frame(h2.RST_STREAM, 0, 3, bytes(4)), BAD),
        (h2.frame(h2.RST_STREAM, 0, 1, bytes(3)), SIZE),
        (h2.frame(h2.SETTINGS, 0, 1, b""), BAD),
        (h2.frame(h2.SETTINGS, 0, 0, bytes(5)), SIZE),
        (h2.frame(h2.SETTINGS, h2.ACK, 0, bytes(6)), SIZE),
        (h2.settings({h2.ENABLE_PUSH: 2}), BAD),
        (h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 31}), ErrorCode.FLOW_CONTROL_ERROR),
        (h2.settings({h2.MAX_FRAME_SIZE: (1 << 14) - 1}), BAD),
        (h2.settings({h2.MAX_FRAME_SIZE: 1 << 24}), BAD),
        (h2.frame(h2.PUSH_PROMISE, 0, 1, bytes(8)), BAD),
        (h2.frame(h2.PING, 0, 0, bytes(7)), SIZE),
        (h2.frame(h2.PING, 0, 1, bytes(8)), BAD),
        (h2.frame(h2.GOAWAY, 0, 1, bytes(8)), BAD),
        (h2.frame(h2.GOAWAY, 0, 0, bytes(7)), SIZE),
        (h2.window_update(0, 0), BAD),
        (h2.window_update(3, 1), BAD),
        (h2.frame(h2.WINDOW_UPDATE, 0, 0, bytes(3)), SIZE),
        (h2.window_update(0, h2.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
        (struct.pack(">HBBBI", 0xFFFF, 0, h2.DATA, 0, 1), SIZE),
        (struct.pack(">HBBBI", 0x0200, 0, 0xBE, 0, 0), ErrorCode.ENHANCE_YOUR_CALM),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_faults_of_the_connection_end_it(peer: Peer, frame: bytes, code: ErrorCode) -> None:
    peer.send(peer.headers(1), frame)
    last, sent, reason = peer.goaway()
    assert (last, sent) == (1, code)
    assert reason
    assert peer.is_closed


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (h2.window_update(1, 0), BAD),
        (h2.window_update(1, h2.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
        (h2.frame(h2.PRIORITY, 0, 1, bytes(4)), SIZE),
    ],
)
def test_faults_of_a_stream_end_only_that(peer: Peer, frame: bytes, code: ErrorCode) -> None:
    peer.send(peer.headers(1), frame)
    assert peer.reset(1) == code
    peer.send(data_frame(1, b"in flight"), h2.window_update(1, 5), h2.frame(h2.RST_STREAM, 0, 1, bytes(4)))
    assert peer.ask(3).messages == [b"hello"]


@pytest.mark.parametrize(
    "fields",
    [
        {":method": None},
        {":path": None},
        {":path": ""},
        {":scheme": None},
        {":unknown": "x"},
        {"connection": "close"},
        {"transfer-encoding": "chunked"},
        {"te": "gzip"},
        {"Upper": "x"},
        {"nul": "a\0b"},
        {"line": "a\nb"},
        {"a b": "x"},
        {"content-length": "x"},
        {"content-length": "-1"},
    ],
    ids=str,
)
def test_malformed_requests_are_reset(peer: Peer, fields: dict[str, str]) -> None:
    peer.send(peer.headers(1, **fields))
    assert peer.reset(1) == ErrorCode.PROTOCOL_ERROR
    assert peer.ask(3).messages == [b"hello"]


@pytest.mark.parametrize("late", [[(":path", ECHO)], [(":method", "POST"), (":method", "POST")]], ids=str)
def test_pseudo_headers_come_first_and_once(peer: Peer, late: list[tuple[str, str]]) -> None:
    fields = [(":method", "POST"), (":scheme", "http"), ("te", "trailers"), *late]
    peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, bytes(peer.encoder.encode(fields))))
    assert peer.reset(1) == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(("said", "sent"), [(9, 10), (11, 10), (0, 10), (10, 10)])
def test_the_length_of_the_content_must_be_as_said(peer: Peer, said: int, sent: int) -> None:
    for stream_id, cut in ((1, 10), (3, 4)):
        whole = message(b"abcde")
        peer.send(peer.headers(stream_id, content_length=str(said)), data_frame(stream_id, whole[:cut]) * (cut < sent))
        peer.send(data_frame(stream_id, whole[cut if cut < sent else 0 :], h2.END_STREAM))
        if said == sent:
            assert peer.answer(stream_id).messages == [b"abcde"]
        else:
            assert peer.reset(stream_id) == ErrorCode.PROTOCOL_ERROR


def test_what_is_no_grpc_is_told_so_in_http(peer: Peer) -> None:
    for stream_id, (fields, status) in enumerate(
        [
            ({"content_type": "application/json"}, "415"),
            ({"content_type": "application/grpc-web"}, "415"),
            ({"content_type": None}, "415"),
            ({":method": "GET"}, "405"),
        ]
    ):
        answer = peer.ask(2 * stream_id + 1, **fields)
        assert (answer.headers[":status"], answer.messages) == (status, [])
    for stream_id, kind in enumerate(("application/grpc+proto", "application/grpc;x=y", "APPLICATION/GRPC"), 20):
        assert peer.ask(2 * stream_id + 1, content_type=kind).messages == [b"hello"]


def test_half_closed_and_closed_streams(peer: Peer, server: GrpcServer) -> None:
    peer.send(peer.request(1, path=HOLD), data_frame(1, b"more"))
    assert peer.reset(1) == ErrorCode.STREAM_CLOSED
    assert server.cancelled.acquire(timeout=PATIENCE_S)
    peer.send(peer.request(3, path=HOLD), peer.headers(3))
    assert peer.reset(3) == ErrorCode.STREAM_CLOSED
    assert peer.ask(5).status == 0
    peer.send(data_frame(5, b"late"))
    assert peer.reset(5) == ErrorCode.STREAM_CLOSED
    assert peer.ask(7).status == 0
    peer.send(peer.headers(7))
    assert peer.goaway()[1] == ErrorCode.STREAM_CLOSED


def test_an_early_answer_resets_what_is_still_being_sent(peer: Peer) -> None:
    peer.send(peer.headers(1, "/none"))
    answer = peer.answer(1)
    assert (answer.status, answer.message) == (12, "there is no method '/none'")
    assert peer.reset(1) == ErrorCode.NO_ERROR
    trailers = bytes(peer.encoder.encode([("checksum", "1")]))
    peer.send(data_frame(1, b"x" * 1000), h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, trailers))
    assert peer.ask(3).status == 0


def test_bugs_of_a_method_end_its_call(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    answer = peer.ask(1, path=BREAK)
    assert (answer.status, answer.message) == (13, "internal error")
    assert "a call failed" in caplog.text
    assert peer.ask(3, b"gone", path=FAIL).message == "gone"


def test_more_streams_than_allowed_are_refused(peer: Peer, server: GrpcServer) -> None:
    for stream_id in range(1, 17, 2):
        peer.send(peer.request(stream_id, path=HOLD))
    peer.send(peer.request(17))
    assert peer.reset(17) == ErrorCode.REFUSED_STREAM
    for _ in range(8):
        assert server.entered.acquire(timeout=PATIENCE_S)
    server.call(lambda: [call.finish() for call in server.held])
    server.held.clear()
    assert peer.answer(1).status == 0
    assert peer.ask(19).messages == [b"hello"]


# Flow control


def test_a_large_request_is_given_windows(peer: Peer) -> None:
    whole = message(b"z" * 5_900_000)
    window, total = h2.DEFAULT_WINDOW, h2.DEFAULT_WINDOW
    greeting = dict(struct.iter_unpack(">HI", next(peer.frames(h2.SETTINGS)).payload))
    window, size = greeting[h2.INITIAL_WINDOW_SIZE], greeting[h2.MAX_FRAME_SIZE]
    assert (window, size) == (STREAM_WINDOW, MAX_FRAME)
    total += h2.UINT32.unpack(next(peer.frames(h2.WINDOW_UPDATE)).payload)[0]
    assert total == CONNECTION_WINDOW
    peer.send(peer.headers(1))
    sent = 0
    while sent < len(whole):
        if window:
            piece = whole[sent : sent + min(window, size)]
            peer.send(data_frame(1, piece))
            sent, window = sent + len(piece), window - len(piece)
        else:
            frame = next(peer.frames(h2.WINDOW_UPDATE))
            window += h2.UINT32.unpack(frame.payload)[0] if frame.stream_id else 0
    peer.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 8 << 20}), h2.window_update(0, 8 << 20))
    peer.send(data_frame(1, b"", h2.END_STREAM))
    assert peer.answer(1).messages == [whole[5:]]


def test_a_client_must_keep_within_the_windows(peer: Peer, server: GrpcServer) -> None:
    peer.send(peer.headers(1, CHAT), data_frame(1, message(b"pause")))
    assert server.entered.acquire(timeout=PATIENCE_S)
    for _ in range(STREAM_WINDOW // MAX_FRAME):
        peer.send(data_frame(1, bytes(MAX_FRAME - 10)))
    peer.send(data_frame(1, bytes(100)))
    assert peer.reset(1) == ErrorCode.FLOW_CONTROL_ERROR
    assert server.cancelled.acquire(timeout=PATIENCE_S)
    server.held.clear()


def test_answers_keep_within_the_windows(peer: Peer) -> None:
    peer.send(peer.request(1, b"3", FLOOD))
    received = 0
    while received < h2.DEFAULT_WINDOW:
        received += len(next(peer.frames(h2.DATA)).payload)
    assert received == h2.DEFAULT_WINDOW
    peer.send(h2.settings({h2.INITIAL_WINDOW_SIZE: h2.DEFAULT_WINDOW + 10}))
    next(each for each in iter(peer.frame, None) if each.kind == h2.SETTINGS and each.flags & h2.ACK)
    peer.send(h2.window_update(0, 100), h2.ping(b"whatever"))
    assert len(next(peer.frames(h2.DATA)).payload) == 10  # the stream's window is smaller
    peer.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 0}), h2.window_update(1, h2.DEFAULT_WINDOW + 15))
    assert len(next(peer.frames(h2.DATA)).payload) == 5  # it was negative in between
    peer.send(h2.window_update(0, 10 << 20), h2.window_update(1, 10 << 20), h2.ping(b"whatever"))
    answer = peer.answer(1)
    assert answer.status == 0


def test_messages_over_many_frames_come_whole(peer: Peer) -> None:
    peer.send(h2.window_update(0, 1 << 24), h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 24}))
    peer.send(peer.request(1, b"12", FLOOD))
    answer = peer.answer(1)
    assert [int.from_bytes(each[:4], "big") for each in answer.messages] == list(range(12))
    assert {len(each) for each in answer.messages} == {FLOOD_BYTES}


def test_a_large_answer_does_not_hold_up_small_ones(server: GrpcServer) -> None:
    peer = server.connect(initial_window_size=1 << 24, max_frame_size=1 << 14)
    peer.send(h2.window_update(0, 1 << 24))
    peer.send(peer.request(1, b"10", FLOOD), peer.request(3))
    order = [frame.stream_id for frame in itertools.islice(peer.frames(h2.DATA), 12)]
    assert 3 in order


def test_a_client_that_does_not_read_loses_its_call(peer: Peer, server: GrpcServer) -> None:
    peer.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 100}))
    peer.send(peer.request(1, b"100", FLOOD))
    assert server.cancelled.acquire(timeout=PATIENCE_S)
    peer.send(h2.window_update(1, 1 << 20))
    answer = peer.answer(1)
    assert (answer.status, answer.message) == (8, "the client has left more than 1000000 bytes of responses unread")
    assert len(answer.messages) <= 1


def test_one_answer_may_be_larger_than_what_may_lie_unread(peer: Peer) -> None:
    peer.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 24}), h2.window_update(0, 1 << 24))
    peer.send(peer.headers(1))
    whole = message(b"x" * 3_000_000)
    for start in range(0, len(whole), MAX_FRAME):
        peer.send(data_frame(1, whole[start : start + MAX_FRAME]))
    peer.send(data_frame(1, b"", h2.END_STREAM))
    assert peer.answer(1).messages == [whole[5:]]


def test_a_smaller_header_table_is_acknowledged_in_the_next_block(peer: Peer) -> None:
    peer.decoder.max_allowed_table_size = 100
    peer.send(h2.settings({h2.HEADER_TABLE_SIZE: 100}))
    next(each for each in iter(peer.frame, None) if each.kind == h2.SETTINGS and each.flags & h2.ACK)
    peer.decoder.max_allowed_table_size = 100
    assert peer.ask(1).status == 0  # the test's decoder requires the size update
    assert peer.ask(3).status == 0


# Abuse


def calm(peer: Peer) -> None:
    """Check that the server has ended the connection with ENHANCE_YOUR_CALM."""
    assert peer.goaway()[1] == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.is_closed


def test_rapid_resets(peer: Peer, server: GrpcServer) -> None:
    for stream_id in range(1, 2 * BURST // CALL + 99, 2):
        peer.send(peer.request(stream_id, path=HOLD), h2.rst_stream(stream_id, ErrorCode.CANCEL))
    calm(peer)
    server.held.clear()


def test_resets_beside_as_many_answers_are_fine(peer: Peer) -> None:
    count = BURST // CALL + 200
    for n in range(count):
        peer.send(peer.request(4 * n + 1), peer.headers(4 * n + 3), h2.rst_stream(4 * n + 3, ErrorCode.CANCEL))
        assert peer.answer(4 * n + 1).messages == [b"hello"]


@pytest.mark.parametrize(
    "frame",
    [
        h2.ping(bytes(8)),
        h2.settings({}),
        data_frame(1, b""),
        data_frame(1, b"\x05" + bytes(5), h2.PADDED),
        h2.frame(h2.PRIORITY, 0, 1, bytes(5)),
        h2.frame(0xAA, 0, 0, b""),
    ],
    ids=repr,
)
def test_floods(peer: Peer, frame: bytes) -> None:
    peer.send(peer.headers(1, CHAT), frame * (BURST + 100))
    calm(peer)


def test_streams_that_are_refused_or_faulty_are_not_free(peer: Peer) -> None:
    peer.send(*(peer.headers(stream_id, "/none") for stream_id in range(1, 2 * BURST // CALL + 99, 2)))
    calm(peer)


def test_floods_of_continuations(peer: Peer) -> None:
    peer.send(h2.frame(h2.HEADERS, 0, 1, b""), h2.frame(h2.CONTINUATION, 0, 1, b"") * (BURST + 1))
    calm(peer)


def test_headers_that_are_too_large(peer: Peer, server: GrpcServer) -> None:
    peer.send(h2.frame(h2.HEADERS, 0, 1, bytes(16000)), h2.frame(h2.CONTINUATION, 0, 1, bytes(16000)) * 4)
    calm(peer)
    bomb = server.connect()
    bomb.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, bomb.block(bomb="x" * 3900) + b"\xbe" * 50))
    calm(bomb)


def test_a_message_over_the_limit_is_refused_by_its_prefix(peer: Peer) -> None:
    peer.send(peer.headers(1), data_frame(1, struct.pack(">BI", 0, 6_000_001)))
    answer = peer.answer(1)
    assert (answer.status, answer.message) == (
        8,
        "a message of 6000001 bytes exceeds the limit of 6000000 (send less, or raise 'max_request_bytes')",
    )
    assert peer.reset(1) == ErrorCode.NO_ERROR


def test_the_bytes_of_all_requests_together_are_bounded() -> None:
    with GrpcServer(max_request_bytes=10_000, max_inflight_bytes=20_000 + 3 * OPEN_BYTES) as server:
        peers = [server.connect() for _ in range(3)]
        for peer in peers[:2]:
            peer.send(peer.headers(1), data_frame(1, message(bytes(9000))[:-1]))
        server.until(lambda: 2 * 9000 <= server.budget.used <= 2 * (9000 + OPEN_BYTES))
        refused = peers[2].ask(1, bytes(3000))
        assert (refused.status, refused.message) == (14, str(server.budget.refusal()))
        assert int(refused.headers["grpc-retry-pushback-ms"]) > 0
        assert peers[2].ask(3, bytes(1000)).status == 0
        peers[0].send(data_frame(1, b"\0", h2.END_STREAM))
        assert peers[0].answer(1).messages == [bytes(9000)]
        assert peers[2].ask(5, bytes(3000)).status == 0
        peers[1].send(h2.rst_stream(1, ErrorCode.CANCEL))
        chat = peers[2]
        chat.send(chat.headers(7, CHAT), *(data_frame(7, message(bytes(900))) for _ in range(9)))
        chat.send(data_frame(7, b"", h2.END_STREAM), chat.request(9, b"x", HOLD))
        assert len(chat.answer(7).messages) == 9
        server.until(lambda: 6 < server.budget.used <= 6 + OPEN_BYTES)
        chat.socket.shutdown(socket.SHUT_WR)
        server.until(lambda: server.budget.used == 0)


def test_open_calls_count_before_their_messages_arrive() -> None:
    room = 100
    with GrpcServer(max_request_bytes=1000, max_inflight_bytes=room * OPEN_BYTES) as server:
        first, second = server.connect(), server.connect()
        first.send(*(first.headers(2 * number + 1, CHAT) for number in range(room)))
        server.until(lambda: server.budget.used >= room * STREAM_BYTES)
        second.send(*(second.headers(2 * number + 1, CHAT) for number in range(room)))
        answer = second.answer(2 * room - 1)
        assert (answer.status, answer.message) == (14, str(server.budget.refusal()))
        first.socket.shutdown(socket.SHUT_WR)
        second.socket.shutdown(socket.SHUT_WR)
        server.until(lambda: server.budget.used == 0)


@pytest.mark.parametrize("more", [0, 1])
def test_an_open_call_includes_a_small_message(more: int) -> None:
    frame_bytes = INCLUDED_BYTES + more
    with GrpcServer() as server:
        peer = server.connect()
        peer.send(peer.headers(1, HOLD))
        server.until(lambda: server.budget.used > 0)
        before = server.call(lambda: server.budget.used)
        peer.send(data_frame(1, message(bytes(frame_bytes - 5)), h2.END_STREAM), h2.ping(b"penstock"))
        next(peer.frames(h2.PING))
        assert server.call(lambda: server.budget.used) - before == (frame_bytes if more else 0)
        peer.send(h2.rst_stream(1, ErrorCode.CANCEL))
        server.until(lambda: server.budget.used == 0)


def test_what_a_stream_has_handed_on_is_its_receivers_to_count() -> None:
    with GrpcServer(max_request_bytes=1000, max_inflight_bytes=1000 + OPEN_BYTES) as server:
        peer, text = server.connect(), message(bytes(900)) * 9
        peer.send(peer.headers(1, CHAT))
        for start in range(0, len(text), 700):  # the cuts are rarely between two messages
            peer.send(data_frame(1, text[start : start + 700]))
        server.until(lambda: server.budget.used <= OPEN_BYTES)
        peer.send(data_frame(1, b"", h2.END_STREAM))
        assert len(peer.answer(1).messages) == 9


def test_a_compressed_request_counts_with_what_it_decompresses_to() -> None:
    with GrpcServer(max_request_bytes=10_000, max_inflight_bytes=20_000 + 3 * OPEN_BYTES) as server:
        packed = gzip.compress(bytes(9000))
        whole = struct.pack(">BI", 1, len(packed)) + packed
        peers = [server.connect() for _ in range(3)]
        for peer in peers[:2]:
            peer.send(
                peer.headers(1, HOLD, grpc_encoding="gzip"),
                data_frame(1, whole[:9]),
                data_frame(1, whole[9:], h2.END_STREAM),
            )
        held = 2 * (9000 + len(packed))
        server.until(lambda: held <= server.budget.used <= held + 2 * OPEN_BYTES)
        peers[2].send(peers[2].headers(1, grpc_encoding="gzip"), data_frame(1, whole, h2.END_STREAM))
        assert peers[2].answer(1).status == 14
        for peer in peers[:2]:
            peer.send(h2.rst_stream(1, ErrorCode.CANCEL))
        server.until(lambda: server.budget.used == 0)
