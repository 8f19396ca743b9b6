"""Large JSON in pieces: decoding gives the same result as decoding the whole text, or an error."""

import json
import tracemalloc
from contextlib import suppress
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from announced_steps import announced
from penstock.errors import InvalidArgument
from penstock.online.server.http.codec import large_json
from penstock.online.server.to_thread import finish

decode = msgspec.json.decode


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats every text as large, so that short texts have many pieces."""
    for name, value in {"LARGE_BYTES": 0, "_LONG": 4, "_PIECE_BYTES": 64, "_SCAN_BYTES": 16}.items():
        monkeypatch.setattr(large_json, name, value)


def plain(value: Any) -> Any:
    """``value`` with lists in place of arrays."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return value.decode() if isinstance(value, bytes) else value


def read(text: bytes) -> Any:
    return finish(large_json.read(text, decode))


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (b"[1,2,3,-4,5,6,7,8,9,10,11,12,13,14,15,16,17]", np.int64),
        (b"[1,2,3,4,5,6,7,8,9,10,11,12,13,14,0.5,1e3,-1]", np.float64),
        (b"[0.5,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", np.float64),
        (b"[1,2,3,4,5,6,7,8,9,10,11,12,13,18446744073709551615]", np.uint64),
        (b"[18446744073709551615,2,3,4,5,6,7,8,9,10,11,12]", np.uint64),
        (b"[true,false,true,true,true,true,false]", np.bool_),
        (b'["a","]","[","\\"","\\\\","{\\u00e9}",",",":","x"]', np.object_),
        (b"[[1,2,3],[4,5,6],[7,8,9],[10,11,12],[13,14,15]]", np.int64),
        (b"[ [ [1 ,2] ,[3,4] ] , [[5,6],\n[7,8]]\t]", np.int64),
        (b'[["a","b"],["c","d"],["e","f"],["g","h"]]', np.object_),
        (b"[[1.5],[2.5],[3.5],[4.5],[5.5]]", np.float64),
    ],
)
def test_long_lists_become_arrays(text: bytes, dtype: Any) -> None:
    array = read(text)
    assert array.dtype == dtype
    assert plain(array) == decode(text)
    found = read(b'{"a":%b,"b":{"c":%b,"shape":[1,2],"d":"]"},"e":[{"f":%b},{"g":[]}]}' % (text, text, text))
    assert all(isinstance(one, np.ndarray) for one in (found["a"], found["b"]["c"], found["e"][0]["f"]))
    assert plain(found["b"]) == {"c": decode(text), "shape": [1, 2], "d": "]"}


@pytest.mark.parametrize(
    "text",
    [
        b"[1,2,3,4,5,6,7,8,9",
        b"[1,2,3,4,5,6,7,,8,9]",
        b"[1,2,3,4,5,6,7,8,9,]",
        b"[,1,2,3,4,5,6,7,8,9]",
        b"[1,2,3,4]5,6,7,8]",
        b"[[1]2,[3]4,[5]6]",
        b"[[1,2],[3,4],[5,6]",
        b"[[1,2],[3,4]],[5,6]]",
        b"[[1 2],[3 4],[5 6]]",
        b"[01,02,03,04,05]",
        b"[1,2,3,4,null,5,6]",
        b"[1,2,3,4,true,5,6]",
        b'["a","b",1,2,3,4,5,6]',
        b'["a""b",,"c","d","e"]',
        b'["a" "b","c","d","e"]',
        b'["a"1,"b","c","d","e"]',
        b'["a\n","b","c","d"]',
        b'["a","b","c","d',
        b'{"a":"x',
        b'{"a":"x\\',
        b"[[1,2],[3],[4,5,6]]",
        b"[[1,2],3,[4,5],6,7]",
        b"[[],[],[],[],[],[]]",
        b"[                   ]",
        b"[" * 40 + b"1" + b"]" * 40,
        b"[-1,2,3,4,5,6,18446744073709551615]",
        b"[18446744073709551615,2,3,4,5,6,7,8,9,-10]",
        b"[18446744073709551616,2,3,4,5,6,7]",
        b"[1,2,3] [4,5,6]",
        b"\xff\xff\xff\xff\xff\xff",
    ],
)
def test_other_texts_are_refused(text: bytes) -> None:
    with pytest.raises((InvalidArgument, msgspec.DecodeError, UnicodeDecodeError)):
        read(text)
    with pytest.raises((InvalidArgument, msgspec.DecodeError, UnicodeDecodeError)):
        read(b'{"x":%b}' % text)


def test_members_with_an_empty_name_are_not_taken_for_long_lists() -> None:
    text = b'{"a":[1,2,3,4,5,6,7,8,9],"b":{"":0},"c":[{"":1},{"":true}]}'
    assert plain(read(text)) == decode(text)


@pytest.mark.parametrize("text", [b"[[],[]]", b"[ [ ], [1,2]]", b'[["a"],[\n]]', b'[["[]","a"],[]]'])
def test_lists_without_elements_in_a_long_list_are_named_as_the_cause(text: bytes) -> None:
    with pytest.raises(InvalidArgument, match="contains an empty list"):
        read(text)


def test_values_outside_of_lists_are_bounded() -> None:
    with mock.patch.object(large_json, "_MAX_MARKS", 20), pytest.raises(InvalidArgument, match="more than 20 values"):
        read(b"[%b]" % b",".join([b'{"a":1}'] * 20))


def test_huge_strings_stay_strings() -> None:
    text = json.dumps({"a": ["x" * 100_000, "y"], "b": 'z\\"' * 50_000, "c": [1, 2, 3, 4]}).encode()
    found = read(text)
    assert plain(found) == json.loads(text)
    assert isinstance(found["c"], np.ndarray)


def test_every_step_is_announced_and_none_is_much() -> None:
    with mock.patch.multiple(large_json, _SCAN_BYTES=256 << 10, _PIECE_BYTES=16 << 10, LARGE_BYTES=64 << 10):
        text = b'{"a":[' + b"0," * 2_000_000 + b"0]}"
        steps = large_json.read(text, decode)
        sizes, found = announced(steps)
        array = found["a"]
        assert array.shape == (2_000_001,)
        assert len(sizes) > len(text) / (256 << 10)
        assert array.nbytes + len(text) <= max(sizes) <= array.nbytes + 4 * len(text)


leaves = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.text()
)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(min_size=1), inner, max_size=5)
)


@given(trees, st.sampled_from([None, 1]))
def test_any_json_is_read_as_usual_or_refused(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent).encode()
    with suppress(InvalidArgument):
        found = plain(read(text))
        assert found == decode(text) or json.dumps(found, default=str) == json.dumps(value), text


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from([np.int64, np.float64, np.bool_]),
    st.sampled_from([None, 2]),
)
def test_any_even_list_is_read(shape: list[int], dtype: Any, indent: int | None) -> None:
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    found = read(json.dumps({"data": array.tolist()}, indent=indent).encode())["data"]
    np.testing.assert_array_equal(found, array)


@given(st.binary(max_size=60) | st.text('[]{}:,"\\01.e-tu', max_size=60).map(str.encode))
def test_what_is_accepted_is_json(text: bytes) -> None:
    with suppress(InvalidArgument, msgspec.DecodeError, UnicodeDecodeError):
        found = plain(read(text))
        assert found == decode(text)


@pytest.mark.parametrize("end", [b"1.5", b"18446744073709551615"])
def test_a_list_that_changes_its_type_is_not_copied(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text, values = b"[" + b"7," * 500_000 + end + b"]", [7] * 500_000 + [json.loads(end)]
    tracemalloc.start()
    try:
        sizes, found = announced(large_json.read(text, msgspec.json.decode))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.tolist() == values
    assert peak <= 500_000 * 8 * 9 // 8 + len(text) + 300_000
    assert peak <= max(sizes)


@pytest.mark.parametrize("text", [b"[" + b"1.5," * 300_000 + b"1.5]", b'{"a":[' + b"0," * 500_000 + b"0]}"])
def test_the_text_is_not_copied(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # pieces of the usual size
    body = bytearray(text)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        sizes, _ = announced(large_json.read(memoryview(body), msgspec.json.decode))
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak <= max(sizes) + 300_000


def test_values_outside_of_lists_are_counted_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = b"[%b]" % b",".join([b'{"a":1}'] * 100_000)
    with pytest.raises(InvalidArgument, match="more than 131072 values"):
        finish(large_json.read(text, never))


def never(text: bytes) -> None:
    raise AssertionError


@pytest.mark.parametrize("gap", [b" " * 10_000, b"\n" * 300_000])
def test_whitespace_is_no_hindrance(gap: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = b'{"a":%b[%b]%b}' % (gap, b",".join([b"1"] * 1000), gap)
    assert np.array_equal(finish(large_json.read(text, msgspec.json.decode))["a"], np.ones(1000))
