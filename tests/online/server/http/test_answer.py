"""Composed responses, read back by httptools' parser."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.online.server.http import answer


class Response:
    """What a client reads."""

    def __init__(self, data: bytes) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = 0
        self.keeps_alive = False
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(data)
        self.status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode()] = value.decode()

    def on_headers_complete(self) -> None:
        self.keeps_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete += 1


def joined(composed: answer.Answer) -> bytes:
    return composed if isinstance(composed, bytes) else b"".join(composed)


@given(st.binary(max_size=300), st.lists(st.binary(max_size=300), max_size=4), st.sampled_from((200, 404, 413, 503)))
def test_a_response_has_its_whole_body(body: bytes, tensors: list[bytes], status: int) -> None:
    data = joined(answer.compose(status, answer.JSON, b"", body, tensors))
    found = Response(data)
    assert (found.status, found.body, found.complete) == (status, body + b"".join(tensors), 1)
    assert found.headers["Content-Type"] == "application/json"


@given(st.binary(max_size=300), st.lists(st.binary(max_size=60_000), max_size=4))
def test_the_answer_to_head_has_the_head_of_the_whole_one(body: bytes, tensors: list[bytes]) -> None:
    whole = answer.compose(200, answer.JSON, b"", body, tensors)
    head = answer.without_body(whole)
    assert joined(whole) == head + body + b"".join(tensors)


@pytest.mark.parametrize(("connection", "keeps_alive"), [(answer.CLOSE, False), (answer.KEEP_ALIVE, True), (b"", True)])
def test_the_connection_is_kept_or_closed(connection: bytes, keeps_alive: bool) -> None:
    assert Response(joined(answer.compose(200, b"", connection, b"x"))).keeps_alive is keeps_alive


def test_large_tensors_are_not_copied() -> None:
    tensor = bytes(1 << 20)
    composed = answer.compose(200, b"", b"", b"{}", [tensor])
    assert isinstance(composed, list)
    assert composed[1] is tensor
    assert Response(joined(composed)).body == b"{}" + tensor


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=5))
def test_a_stream_of_chunks_ends_with_the_last(chunks: list[bytes]) -> None:
    head = answer.compose_stream(answer.JSON, b"", is_chunked=True)
    data = head + b"".join(map(answer.compose_chunk, chunks)) + answer.LAST_CHUNK
    found = Response(data)
    assert (found.status, found.body, found.complete) == (200, b"".join(chunks), 1)


def test_the_end_of_the_connection_ends_a_stream_without_chunks() -> None:
    found = Response(answer.compose_stream(answer.JSON, answer.CLOSE, is_chunked=False) + b"abc")
    assert (found.body, found.complete, found.keeps_alive) == (b"abc", 0, False)
