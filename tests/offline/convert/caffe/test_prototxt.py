from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidModel
from penstock.offline.convert.caffe.prototxt import read_prototxt


def test_every_kind_of_value() -> None:
    message = read_prototxt(
        b"""# a comment; with { brackets
        name: "a \\"net\\"" 'joined'
        count: -3, hex: 0x10; small: 1e-3 wide: 2f yes: true kind: MAX
        list: [1, 2, 3]  list: 4
        inner { x: 1 } inner: < x: 2 >
        """
    )
    assert message.get("name", "") == 'a "net"joined'
    assert message.get("count", 0) == -3
    assert message.get("hex", 0) == 16
    assert message.get("small", 0.0) == pytest.approx(0.001)
    assert message.get("wide", 0.0) == 2
    assert message.get("yes", False)
    assert message.get("kind", "") == "MAX"
    assert message.all("list", int) == [1, 2, 3, 4]
    assert [one.get("x", 0) for one in message.messages("inner")] == [1, 2]
    assert [one.line for one in message.messages("inner")] == [5, 5]
    assert message.get("absent", 7) == 7
    assert "x" not in message.message("absent")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "ends within"),
        ("a {", "ends within"),
        ("}", "line 1: '}' is not expected here"),
        ("a: { b: 1 >", "is not expected here"),
        ("\n\na b", "line 3: 'b' is not expected here"),
        ("a: [1, 2", "ends within"),
        ("a: [ { } ]", "in a list"),
        ("a: 'x", "is not expected here"),
        ("a::1", "':' is not expected here"),
        ("a: @", "'@' is not expected here"),
    ],
)
def test_wrong_text_is_explained(text: str, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        read_prototxt(text.encode())


@pytest.mark.parametrize(
    ("text", "read"),
    [("a: 1.5", int), ("a: true", int), ("a: 1", bool), ("a: x", float), ("a { }", str), ("a: 99999999999", int)],
)
def test_values_of_another_type(text: str, read: type) -> None:
    with pytest.raises(InvalidModel, match="line 1: 'a' must be"):
        read_prototxt(text.encode()).all("a", read)


def test_a_value_where_a_message_belongs() -> None:
    with pytest.raises(InvalidModel, match="must be a message in braces, got '1'"):
        read_prototxt(b"a: 1").message("a")


def test_many_fields_take_time_in_proportion() -> None:
    message = read_prototxt(b"a { b: 1 }\n" * 50_000)
    assert message.messages("a")[-1].line == 50_000


@given(st.text(alphabet="ab:{}[]<>\"'#\\\n ,;.1-", max_size=60))
def test_any_text_gives_a_message_or_an_error(text: str) -> None:
    with contextlib.suppress(InvalidModel):
        read_prototxt(text.encode())
