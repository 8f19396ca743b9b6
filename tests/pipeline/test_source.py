from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidConfig
from penstock.pipeline.source import MAX_BYTES, MAX_DEPTH, read_json, read_source

_TEXTS = st.text(st.characters(codec="ascii", exclude_characters="\x7f", min_codepoint=32))
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(_VALUES)
def test_yaml_gives_the_data_that_was_written(value: object) -> None:
    data = {"top": value}
    assert read_source(json.dumps(data).encode(), "a.yaml").data == data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("no", "no"), ("on", "on"), ("007", "007"), ("1e3", 1000.0), ("-0.5", -0.5), (".5", 0.5), ("12", 12)),
        *(
            ("~", None),
            ("", None),
            ("true", True),
            ("tRue", "tRue"),
            ("'1'", "1"),
            ("1:30", "1:30"),
            ("1_000", "1_000"),
        ),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    assert read_source(f"x: {text}".encode(), "a.yaml").data == {"x": value}


def test_lines_of_values() -> None:
    text = "name: x\n\nsteps:\n  - a: 1\n    b:\n      - 5\n      - 6\n"
    source = read_source(text.encode(), "a.yaml")
    assert [source.line(path) for path in [("name",), ("steps", 0, "b"), ("steps", 0, "b", 1), ("steps", 0, "c")]] == [
        1,
        5,
        7,
        4,
    ]
    toml = 'name = "x"\n# note\nlist = [\n  1,\n  2,\n]\n[[steps]]\na = 1\n[[steps]]\nb = 2\n'
    source = read_source(toml.encode(), "a.toml")
    assert [source.line(path) for path in [("list", 1), ("steps", 0, "a"), ("steps", 1, "b"), ("none",)]] == [
        3,
        8,
        10,
        1,
    ]


_BOMB = "a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: [*b, *b, *b, *b, *b, *b, *b, *b]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_BOMB, r"a.yaml, line 1: the alias '&a' is not supported"),
        ("x: *none", r"line 1: .*alias"),
        ("x: " + "[" * 40 + "]" * 40, f"line 1: the values are nested deeper than {MAX_DEPTH} levels"),
        ("x: " + "[" * 50_000, "nested deeper|not valid YAML"),
        ("x: !!python/object/apply:os.system [ls]", r"line 1: the tag '.*' is not supported"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' occurs twice"),
        ("a: 1\n  b: 2", "line 2: this is not valid YAML"),
        ("? [1]\n: 2", "a key must be text"),
        ("a: 1\n---\nb: 2", "second document"),
        ("x: 123456789012345678901234567890", "is too large"),
        ("x: [" + "1," * 100_001 + "1]", "more than 100000 values"),
        (" " * (MAX_BYTES + 1), "at most"),
    ],
)
def test_hostile_and_broken_yaml_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        read_source(text.encode(), "a.yaml")


@pytest.mark.parametrize("text", ["a = ", "a = " + "[" * 5000, "a = " + "[" * 40 + "]" * 40])
def test_broken_toml_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="not valid TOML|nested deeper"):
        read_source(text.encode(), "a.toml")


def test_other_bytes_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"a.yaml, line 2: the file is not UTF-8"):
        read_source(b"a: 1\nb: \xff", "a.yaml")
    for text in (b"[" * 100_000, b"{", b"\xff"):
        with pytest.raises(InvalidConfig, match="not valid JSON"):
            read_json(text, "pipeline.json")


def test_numbers_and_text_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="is not valid TOML"):
        read_source(b"a = " + b"1" * 5_000, "p.toml")
    for text in (b'a:\n  - "x\\ud800"', b'a:\n  "\\udfff": 1'):
        with pytest.raises(InvalidConfig, match="line 2: the text has half a surrogate pair"):
            read_source(text, "p.yaml")
    for name, number in (("p.toml", "a = [\n1, inf]"), ("p.toml", "a = [\n1, -nan]"), ("p.yaml", "a:\n  - 1e999")):
        with pytest.raises(InvalidConfig, match=rf"{name}, line [12]: the number (inf|nan) is not finite"):
            read_source(number.encode(), name)
    assert read_source('a: "\\ue000😀"'.encode(), "p.yaml").data == {"a": "\ue000😀"}


_KEYS = st.sampled_from(["a", "b", '"c.d"', "'#'", "e-1"])
_VALUES_IN_TOML = st.sampled_from(
    [
        "1",
        '"x"',
        "[1, [2, 3]]",
        "[\n  1, # ]\n  {b = 2}, {a.b = 3},\n]",
        '"""\n[a]\nb = 1 \\"""x"""',
        "'''\n#\n''x'''",
        "{a = {b = [1]}, b = '}'} # [",
        '"# \\" ["',
    ]
)
_DOTTED_KEYS = st.lists(_KEYS, min_size=1, max_size=3).map(" . ".join)
_STATEMENTS = st.one_of(
    st.builds("{} = {}".format, _DOTTED_KEYS, _VALUES_IN_TOML),
    st.builds("  [{}] # note".format, _DOTTED_KEYS),
    st.builds("[[{}]]".format, _DOTTED_KEYS),
    st.sampled_from(["", "# a = ["]),
)


def _paths(data: Any) -> list[tuple[str | int, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [(), *((key, *rest) for key, value in inner for rest in _paths(value))]


def _has(data: Any, path: tuple[str | int, ...]) -> bool:
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _first_line(text: str, path: tuple[str | int, ...]) -> int:
    """The first line of the statement that ends the shortest valid prefix of ``text`` with a value at ``path``."""
    lines, begin = text.splitlines(keepends=True), 0
    for count in range(1, len(lines) + 1):
        try:
            data = tomllib.loads("".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        if _has(data, path):
            return begin + 1
        begin = count
    return 1


@given(st.lists(_STATEMENTS, max_size=8))
def test_lines_of_toml_are_those_of_its_prefixes(statements: list[str]) -> None:
    kept = ""
    for statement in statements:
        try:
            tomllib.loads(kept + statement + "\n")
        except tomllib.TOMLDecodeError:
            continue
        kept += statement + "\n"
    source = read_source(kept.encode(), "p.toml")
    for path in _paths(source.data)[1:]:
        assert source.line(path) == source.line((*path, "none")) == _first_line(kept, path), (kept, path)


def test_a_hostile_toml_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"[[steps]]\nx = {number} # [\n" for number in range(20_000))
    source, parsed = read_source(text.encode(), "p.toml"), 0
    loads = tomllib.loads

    def counted(part: str) -> dict[str, Any]:
        nonlocal parsed
        parsed += len(part)
        return loads(part)

    monkeypatch.setattr(tomllib, "loads", counted)
    assert source.line(("steps", 19_999, "x")) == 40_000
    assert parsed <= len(text)


@pytest.mark.parametrize(
    "chain", ["a" + ".a" * 400_000, "a" + ' . "a"' * 100_000, "x='1'\n[" + "'.' . " * 150_000 + "a]"]
)
def test_a_key_of_too_many_parts_is_refused(chain: str) -> None:
    with pytest.raises(InvalidConfig, match="line [12]: a dotted key has more than 100 parts"):
        read_source(f"{chain} = 1".encode(), "p.toml")
