import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.online.server.http.head import MAX_KNOWN_BYTES, KnownHeads, RequestHead, is_plain


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        (b"Inference-Header-Content-Length", b"12", "json_length", 12),
        (b"content-encoding", b"GZip", "encoding", b"gzip"),
        (b"Content-Encoding", b"identity", "encoding", b""),
        (b"Accept-Encoding", b"br, gzip;q=0.5", "accepted", b"gzip"),
        (b"Authorization", b"Bearer abc", "credential", b"abc"),
        (b"Authorization", b"Basic abc", "credential", None),
        (b"X-API-Key", b"abc", "credential", b"abc"),
        (b"traceparent", b"00-a-b-01", "traceparent", "00-a-b-01"),
        (b"tracestate", b"a=b", "tracestate", "a=b"),
        (b"Host", b"x", "credential", None),
    ],
)
def test_headers_that_matter(name: bytes, value: bytes, field: str, expected: object) -> None:
    head = RequestHead()
    head.read(name, value)
    assert getattr(head, field) == expected


CHROME = b"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (CHROME, True),
        (b"text/html", True),
        (b"Text/HTML", True),
        (b"text/html, application/json;q=0.9", True),
        (b"", False),
        (b"*/*", False),
        (b"application/json", False),
        (b"application/json, text/html", False),
        (b"application/json, text/html;q=0.9, */*;q=0.1", False),
        (b"text/html;q=0.5, */*", False),
        (b"text/html;q=0", False),
        (b"text/html;q=x", False),
        (b"text/htmlx", False),
        (b"text/*", False),
    ],
)
def test_only_browsers_prefer_html(accept: bytes, expected: bool) -> None:
    head = RequestHead()
    head.read(b"Accept", accept)
    assert head.prefers_html is expected
    assert RequestHead().prefers_html is False


@pytest.mark.parametrize("value", [b"", b"-1", b"1e3", b"9" * 30, b" 1"])
def test_a_length_that_is_no_number(value: bytes) -> None:
    with pytest.raises(InvalidArgument, match="not a number of bytes"):
        RequestHead().read(b"Inference-Header-Content-Length", value)


def test_only_heads_whose_end_all_agree_on_are_remembered() -> None:
    heads = KnownHeads()
    for text in (
        b"\r\nGET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nA: b\r\n\r\n",
        b"GET / HTTP/1.1\n\nbody\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: %b\r\n\r\n" % (b"x" * MAX_KNOWN_BYTES),
    ):
        heads.learn(text, RequestHead())
    assert not heads
    heads.learn(b"GET / HTTP/1.1\r\n\r\n", RequestHead())
    assert len(heads) == 1


def test_the_memory_of_heads_is_bounded() -> None:
    heads = KnownHeads()
    for number in range(5000):
        heads.learn(b"GET /%d HTTP/1.1\r\n\r\n" % number, RequestHead())
    assert len(heads) <= 1024


@given(st.binary())
def test_plain_text_has_no_other_line_ends(text: bytes) -> None:
    if is_plain(text):
        assert b"\n" not in text.replace(b"\r\n", b"")
