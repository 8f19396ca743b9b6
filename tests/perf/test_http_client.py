"""Tests of penstock.perf.http_client."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import DeadlineExceeded, InvalidArgument, Unavailable, Unsupported
from penstock.perf.http_client import Address, AnswerHead, HttpAnswer, HttpSession, parse_head
from penstock.perf.load import run
from servers import answer, answering, serving

QUESTION = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("url", "address", "authority"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000), "127.0.0.1:8000"),
        ("localhost:8000/", Address("localhost", 8000), "localhost:8000"),
        ("http://example.org", Address("example.org", 80), "example.org:80"),
        ("http://[::1]:8000", Address("::1", 8000), "[::1]:8000"),
    ],
)
def test_an_address_is_read_from_a_url(url: str, address: Address, authority: str) -> None:
    assert Address.parse(url) == address
    assert address.authority == authority
    assert Address.parse(address.url) == address


@pytest.mark.parametrize(
    "url",
    ["", "http://", "ftp://x:1", "http://x:port", "http://x:99999", "http://x:1/v2", "http://u@x:1", "http://a b"],
)
def test_a_bad_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"bad URL .*e\.g\. http://127\.0\.0\.1:8000"):
        Address.parse(url)


def test_heads_are_read_whatever_the_case_and_spaces() -> None:
    assert parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: 12") == AnswerHead(200, 12, None, close=False)
    assert parse_head(
        b"HTTP/1.1 404\r\ncontent-length:3\r\nInference-Header-Content-Length:  2 \r\nCONNECTION: Close"
    ) == (AnswerHead(404, 3, 2, close=True))
    assert parse_head(b"HTTP/1.0 200 OK\r\nContent-Length: 0").close
    assert not parse_head(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive").close


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/2 200",
        b"HTTP/1.1 OK\r\nContent-Length: 1",
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1",
    ],
)
def test_a_head_without_status_or_length_is_refused(head: bytes) -> None:
    with pytest.raises(Unsupported):
        parse_head(head)


def test_answers_arrive_whole_however_they_are_cut() -> None:
    text = answer(b"0123456789", headers="Inference-Header-Content-Length: 4\r\n")
    cuts = iter(range(1, len(text)))

    async def handle(request, writer):
        cut = next(cuts)
        writer.write(text[:cut])
        await writer.drain()
        await asyncio.sleep(0.001)  # lets the first piece go out as a packet of its own
        writer.write(text[cut:])

    async def main() -> list[HttpAnswer]:
        async with serving(handle) as address:
            session = HttpSession(address)
            try:
                return [await session.ask(QUESTION) for _ in range(1, len(text))]
            finally:
                session.close()

    assert set(run(main())) == {HttpAnswer(200, b"0123456789", 4)}


def test_an_answer_may_come_byte_by_byte_or_be_large() -> None:
    large = bytes(range(256)) * 40_000
    bodies = iter([b"tiny", large, b"", large])

    async def handle(request, writer):
        text = answer(next(bodies))
        for byte in text if len(text) < 100 else [text]:
            writer.write(bytes([byte]) if isinstance(byte, int) else byte)
            await writer.drain()

    async def main() -> list[bytes]:
        async with serving(handle) as address:
            session = HttpSession(address)
            try:
                return [(await session.ask(QUESTION)).body for _ in range(4)]
            finally:
                session.close()

    assert run(main()) == [b"tiny", large, b"", large]


def test_a_session_says_why_there_is_no_answer_and_recovers() -> None:
    async def hang_up(request, writer):
        writer.close()

    async def hang(request, writer):
        await asyncio.Event().wait()

    handlers = iter([hang_up, answering(b"what?\r\n\r\n"), hang, answering(answer(b"at last"))])

    async def handle(request, writer):
        await next(handlers)(request, writer)

    async def main() -> bytes:
        async with serving(handle) as address:
            session = HttpSession(address)
            with pytest.raises(Unavailable, match="connection dropped"):
                await session.ask(QUESTION)
            with pytest.raises(Unavailable, match="unreadable answer"):
                await session.ask(QUESTION)
            hasty = HttpSession(address, timeout_s=0.1)
            with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
                await hasty.ask(QUESTION)
            hasty.close()
            try:
                return (await session.ask(QUESTION)).body
            finally:
                session.close()

    assert run(main()) == b"at last"


def test_an_encrypted_address() -> None:
    address = Address.parse("https://example.org", key="abc")
    assert (address.port, address.url) == (443, "https://example.org:443")
    assert address.fields == "Host: example.org:443\r\nAuthorization: Bearer abc\r\n"
    assert address.tls is not None
    assert address.tls.check_hostname
