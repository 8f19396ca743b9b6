from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.online.server.http.dialects.multipart import Part, read_parts

KIND = b"multipart/form-data; boundary=b"


def part(name: str, content: bytes, kind: bytes = b"") -> bytes:
    extra = b"Content-Type: %b\r\n" % kind if kind else b""
    head = b'Content-Disposition: form-data; name="%b"; filename="f.bin"\r\n' % name.encode()
    return b"--b\r\n%b%b\r\n%b\r\n" % (head, extra, content)


@given(st.lists(st.binary(max_size=30).filter(lambda content: b"\r\n--b" not in b"\r\n" + content), min_size=1))
def test_parts_are_taken_as_they_are(contents: list[bytes]) -> None:
    body = b"".join(part(f"p{n}", content, b"text/x") for n, content in enumerate(contents)) + b"--b--\r\n"
    assert read_parts(KIND, body) == [Part(f"p{n}", b"text/x", content) for n, content in enumerate(contents)]


def test_forms_of_the_head() -> None:
    body = b'preamble\r\n--a-b\r\ncontent-disposition: form-data; filename="name"; NAME=x\r\n\r\n1\r\n--a-b--'
    assert read_parts(b'multipart/form-data; charset=utf-8; Boundary="a-b"', body) == [Part("x", b"", b"1")]


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (b"multipart/form-data", b"", "without a boundary"),
        (b"multipart/form-data; boundary=", b"", "without a boundary"),
        (KIND, b"", "no parts"),
        (KIND, b"--b--", "no parts"),
        (KIND, part("x", b"1"), "truncated"),
        (KIND, part("", b"1") + b"--b--", "no name"),
        (KIND, b"--b\r\nContent-Type: text/plain\r\n\r\n1\r\n--b--", "no name"),
        (KIND, b"--b\r\nContent-Disposition: form-data; name=x\r\n--b--", "no name"),
        (KIND, part("x", b"1") * 257 + b"--b--", "more than 256 parts"),
    ],
)
def test_what_is_refused(kind: bytes, body: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_parts(kind, body)


def test_as_many_parts_as_there_may_be() -> None:
    assert len(read_parts(KIND, part("x", b"1") * 256 + b"--b--")) == 256


@given(st.binary(max_size=80))
def test_any_bytes_are_parts_or_refused(body: bytes) -> None:
    with suppress(InvalidArgument):
        read_parts(KIND, b"--b\r\n" + body + b"\r\n--b--")
