"""Arrays of trees that contradict each other are refused."""

import msgspec
import numpy as np
import pytest

from penstock.offline.convert.tree_arrays import AT_MOST, LEAF, TreeArrays
from penstock.tensor import Array


def _whole(*values: int) -> Array:
    return np.array(values, np.int64)


_STUMP = TreeArrays(
    roots=_whole(0),
    kind=_whole(AT_MOST, LEAF, LEAF),
    feature=_whole(0, 0, 0),
    threshold=np.zeros(3),
    yes=_whole(1, -1, -1),
    no=_whole(2, -1, -1),
    missing_yes=np.zeros(3, np.bool_),
    set_node=_whole(),
    set_member=np.zeros(0),
    leaf=_whole(1, 2),
    target=_whole(0, 0),
    value=np.ones(2),
    base=np.zeros(1),
)


def test_a_stump_is_valid() -> None:
    assert _STUMP.is_valid


@pytest.mark.parametrize(
    "change",
    [
        {"roots": _whole(3)},
        {"roots": _whole(-1)},
        {"yes": _whole(7, -1, -1)},
        {"no": _whole(-1, -1, -1)},
        {"yes": _whole(1, 2, -1)},
        {"leaf": _whole(1, 9)},
        {"value": np.ones(3)},
        {"threshold": np.zeros(2)},
        {"threshold": np.zeros(3, np.float32)},
        {"missing_yes": np.zeros(3)},
        {"base": np.zeros((1, 1))},
        {"set_node": _whole(-1), "set_member": np.zeros(1)},
    ],
)
def test_a_contradiction_is_found(change: dict[str, Array]) -> None:
    assert not msgspec.structs.replace(_STUMP, **change).is_valid
