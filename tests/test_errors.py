from __future__ import annotations

import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import errors
from penstock.errors import (
    Code,
    EngineUnavailable,
    InvalidArgument,
    InvalidModel,
    PenstockError,
    Unavailable,
    bounded,
    printable,
    quoted,
    revive,
    shortened,
)

_LINE = re.compile(r"^ {4}(?P<branch>[│├└─ ]*)(?P<name>\w+) +(?P<code>[A-Z_]+) {2,}\S")


def _classes() -> dict[str, type[PenstockError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, PenstockError)
    }


def _drawn() -> list[tuple[str, str, str]]:
    """``(class, parent, code)`` for each line of the tree in the module's docstring."""
    rows, parents = [], {-1: "Exception"}
    for match in filter(None, map(_LINE.match, (errors.__doc__ or "").splitlines())):
        depth = len(match["branch"]) // 4
        parents[depth] = match["name"]
        rows.append((match["name"], parents[depth - 1], match["code"]))
    return rows


def test_the_drawn_tree_is_the_tree() -> None:
    assert _drawn() == [(name, cls.__base__.__name__, cls.code.value) for name, cls in _classes_as_drawn()]
    assert len(_drawn()) == len(_classes()) > 15


def _classes_as_drawn() -> list[tuple[str, type[PenstockError]]]:
    order = [name for name, _, _ in _drawn()]
    return sorted(_classes().items(), key=lambda item: order.index(item[0]))


def test_every_code_is_used_and_names_itself() -> None:
    assert {cls.code for cls in _classes().values()} == set(Code)
    assert all(code.name == code.value for code in Code)


def test_text_is_cause_then_fix() -> None:
    assert str(InvalidArgument("no input 'x'", "give it")) == "no input 'x' (give it)"
    assert str(InvalidArgument("no input 'x'")) == "no input 'x'"


def test_a_missing_engine_names_the_install_line() -> None:
    error = EngineUnavailable("openvino", "penstock[openvino]", reason="No module named 'openvino'")
    assert str(error) == (
        "engine 'openvino' is not available: No module named 'openvino' (pip install 'penstock[openvino]')"
    )


def test_one_except_clause_catches_a_branch() -> None:
    with pytest.raises(InvalidArgument):
        raise InvalidModel("corrupt")


@pytest.mark.parametrize("cls", _classes().values())
def test_an_error_of_another_process_is_of_its_class_or_the_one_above(cls: type[PenstockError]) -> None:
    revived = revive(cls.__name__, "the cause", "the fix")
    assert str(revived) == "the cause (the fix)"
    assert type(revived) is (Unavailable if cls is EngineUnavailable else cls)


@pytest.mark.parametrize("kind", ["", "InstanceDied", "Code", "annotations", "ClassVar"])
def test_an_error_that_is_not_known_here_is_one_of_ours(kind: str) -> None:
    assert type(revive(kind, "the cause", "")) is PenstockError


def test_an_error_within_something_else_stays_what_it_is() -> None:
    found = errors.prefixed("in 'a', ", errors.Unavailable("busy", "wait", 3))
    assert type(found) is errors.Unavailable
    assert (str(found), found.retry_after_s) == ("in 'a', busy (wait)", 3)


_ANY = st.characters(codec=None)


@given(st.text(_ANY))
def test_printable_text_has_no_control_character_and_keeps_the_rest(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(text) == text or not text.isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a\\nb"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b", "\\x9b"),
        ("\u202e", "\\u202e"),
        ("\ud800", "\\ud800"),
        ("é😀", "é😀"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert (printable(text), quoted(text)) == (shown, f"'{shown}'")


@given(st.text(_ANY, max_size=500), st.integers(1, 200))
def test_a_shortened_text_is_short(text: str, limit: int) -> None:
    shown = shortened(text, limit)
    assert len(shown) <= limit + 1
    assert shown.isprintable()


def test_a_long_name_is_cut_off() -> None:
    assert quoted("x" * 1_000_000) == "'" + "x" * 80 + "…'"


@given(st.text(_ANY, max_size=3000) | st.sampled_from('"\\\n\0\u202ex😀').map(lambda each: each * 5000))
def test_a_bounded_text_is_short_as_json(text: str) -> None:
    shown = bounded(text)
    assert len(orjson.dumps(shown)) <= 962
    assert shown.replace("\n", "").isprintable()
    assert shown == text or len(text) > 300 or not text.isprintable()


def test_a_bounded_text_keeps_cause_and_fix() -> None:
    shown = bounded(str(InvalidArgument("the cause: " + "x" * 1_000_000, "the fix")))
    assert shown.startswith("the cause: xxx")
    assert shown.endswith("xxx (the fix)")
