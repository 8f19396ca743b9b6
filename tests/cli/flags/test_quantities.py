from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.flags.quantities import parse_counts, parse_milliseconds, parse_seconds, parse_share
from penstock.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "value"),
    [("1%", 0.01), ("0.5 %", 0.005), (" 100% ", 1.0), ("0.01", 0.01), ("0", 0.0), (".5%", 0.005), ("0.99", 0.99)],
)
def test_shares(text: str, value: float) -> None:
    assert parse_share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "%", "-1%", "one", "1%%", "1e-2", "nan", "inf", "1,5%", "1 0%"])
def test_what_is_not_a_share(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a fraction") as raised:
        parse_share(text)
    assert "1%" in raised.value.hint


def test_more_than_the_whole_asks_what_was_meant() -> None:
    for text in ("1", "2"):
        with pytest.raises(InvalidArgument, match="must be below 1") as raised:
            parse_share(text)
        assert raised.value.hint == f"did you mean {text}%?"
    with pytest.raises(InvalidArgument, match="must be at most 100%"):
        parse_share("101%")


@pytest.mark.parametrize(
    ("text", "value"), [("5ms", 5.0), ("0.2s", 200.0), ("800us", 0.8), ("800µs", 0.8), ("5", 5.0), (" 1.5 ms ", 1.5)]
)
def test_milliseconds(text: str, value: float) -> None:
    assert parse_milliseconds(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20", 20.0),
        ("20s", 20.0),
        ("500ms", 0.5),
        (" 1.5 ", 1.5),
        ("2 s", 2.0),
        ("10m", 600),
        ("1.5 min", 90),
        ("2h", 7200),
    ],
)
def test_seconds_are_meant_where_no_unit_is_given(text: str, value: float) -> None:
    assert parse_seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "ms", "-5ms", "5m", "5 minutes", "1:30", "nan", "5ms5"])
def test_what_is_not_a_time(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a time") as raised:
        parse_milliseconds(text)
    assert "5ms" in raised.value.hint


@pytest.mark.parametrize(("text", "value"), [("1", (1,)), ("1,16,64", (1, 16, 64)), (" 2 , 1 ", (2, 1))])
def test_counts(text: str, value: tuple[int, ...]) -> None:
    assert parse_counts(text) == value


@pytest.mark.parametrize("text", ["", ",", "1,", "0", "1,-2", "1.5", "a", "1 2", "²"])
def test_what_is_not_a_list_of_counts(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a list of whole numbers") as raised:
        parse_counts(text)
    assert "1,16,64" in raised.value.hint


@given(st.text(max_size=12))
def test_any_text_is_a_value_or_an_error_of_ours(text: str) -> None:
    for parse in (parse_share, parse_milliseconds, parse_counts):
        try:
            parse(text)
        except InvalidArgument:
            continue


@given(st.integers(0, 10_000))
def test_shares_written_as_percent_come_back(basis_points: int) -> None:
    assert parse_share(f"{basis_points / 100}%") == pytest.approx(basis_points / 10_000)
