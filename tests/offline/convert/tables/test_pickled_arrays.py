"""Pickled arrays and their types: raw memory never becomes objects."""

import pickle

import numpy as np
import pytest

from hostile_pickles import Calls, Rebuilt
from penstock.errors import InvalidModel, PenstockError
from penstock.offline.convert.tables.pickles import BASIC, load_trusted

RECONSTRUCT = np.ones(1).__reduce__()[0]


OBJECTS = np.dtype("O")


BYTES = b"12345678"


@pytest.mark.parametrize(
    "attack",
    {
        "constructor": Calls(np.ndarray, (1,), "O", BYTES),
        "content": Rebuilt(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1,), OBJECTS, False, BYTES)),
        "scalar": Calls(np.float64(1).__reduce__()[0], OBJECTS, BYTES),
        "fields": Calls(np.float64(1).__reduce__()[0], np.dtype([("a", "O")]), BYTES),
        "shape": Rebuilt(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1 << 40, 1 << 40), np.dtype("f8"), False, BYTES)),
        "short": Rebuilt(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (2,), np.dtype("f8"), False, BYTES)),
        "subclass": Rebuilt(RECONSTRUCT, (np.matrix, (0,), b"b"), (1, (1,), np.dtype("f8"), False, BYTES)),
        "state": Rebuilt(np.dtype, ("V16", False, True), (3, 5, b"", "", {1: 2}, "", [], 0)),
    }.items(),
    ids=lambda attack: attack[0],
)
def test_raw_memory_cannot_become_objects(attack):
    """numpy's own functions would read pointers from the bytes, and crash."""
    with pytest.raises(PenstockError):
        load_trusted(pickle.dumps(attack[1]), BASIC)


def test_an_array_is_filled_only_once():
    """A second content would free the memory of the first one, which other objects may use."""
    array = pickle.dumps(np.ones(3), 2)
    state = array[array.rindex(b"(K\x01") : -1]
    assert state.endswith(b"b")
    again = array[:-1] + state + b"."
    assert pickle.loads(again).tolist() == [1, 1, 1]
    with pytest.raises(InvalidModel, match="does not fit"):
        load_trusted(again, BASIC)


@pytest.mark.parametrize("kind", ["O", [("a", "O")], "f8"])
def test_changed_flags_of_types_are_ignored(kind):
    _, arguments, state = np.dtype(kind).__reduce__()
    data = pickle.dumps(Rebuilt(np.dtype, arguments, (*state[:7], state[7] ^ 63)))
    assert load_trusted(data, BASIC).flags == np.dtype(kind).flags


def test_the_layout_of_a_type_in_use_does_not_change():
    """Otherwise the numbers of an array could become pointers after they were read."""
    save, get = b"r\xff\xff\0\0", b"j\xff\xff\0\0"  # the memo's last entry

    def state(kind):
        return pickle.dumps(np.dtype(kind).__reduce__()[2], 2)[2:-1] + b"b"

    data = b"\x80\x02]" + b"cnumpy\ndtype\nX\2\0\0\0V8\x85R" + save + state([("a", "f8")]) + b"a"
    data += pickle.dumps(RECONSTRUCT, 2)[2:-1] + b"cnumpy\nndarray\nK\0\x85X\1\0\0\0b\x87R"
    data += b"(K\1K\1\x85" + get + b"\x89" + pickle.dumps(BYTES, 2)[2:-1] + b"tba" + get + state([("a", "O")]) + b"a."
    before, array, after = load_trusted(data, BASIC)
    assert (before.hasobject, array.dtype.hasobject, after.hasobject) == (False, False, True)
    assert array.tobytes() == BYTES
