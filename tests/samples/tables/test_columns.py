from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidData
from penstock.samples.tables.columns import Columns
from penstock.tensor import DataType, Signature, TensorSpec

Y = (TensorSpec("y", DataType.FP32, (-1, 1)),)
STATEFUL = Signature((TensorSpec("x", DataType.FP32, (-1, 2)), TensorSpec("state", DataType.FP32, (2, -1, 4))), Y)


def sample(columns: Columns) -> dict[str, object]:
    """The sample of a row whose values are the numbers of their columns."""
    return columns.sample(lambda _, place: place)


@given(st.permutations(["one", "two", "three", "labels", "more"]))
def test_columns_are_found_by_name_in_any_order(names: list[str]) -> None:
    inputs = [TensorSpec(name, DataType.FP32, (-1, 1)) for name in ("one", "two", "three")]
    found = sample(Columns("t", names, Signature(tuple(inputs), Y)))
    assert found == {name: [names.index(name)] for name in ("one", "two", "three")} | {"labels": names.index("labels")}


@given(st.permutations(["a", "b", "labels", "c"]))
def test_the_features_of_one_input_keep_their_order(names: list[str]) -> None:
    found = sample(Columns("t", names, Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), Y)))
    assert found == {
        "x": [place for place, name in enumerate(names) if name != "labels"],
        "labels": names.index("labels"),
    }


def test_states_need_no_column_and_the_sequence_is_no_feature() -> None:
    assert sample(Columns("t", ["a", "sequence", "b"], STATEFUL, {"state"})) == {"x": [0, 2], "sequence": 1}
    wide = Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), Y)
    assert sample(Columns("t", ["a", "sequence", "b"], wide)) == {"x": [0, 1, 2]}
    with pytest.raises(
        InvalidData, match=r"has the columns \['a', 'b'\], but the model has the inputs \['x', 'state'\]"
    ):
        Columns("t", ["a", "b"], STATEFUL)


def test_an_input_named_like_labels_is_an_input() -> None:
    named = Signature((TensorSpec("labels", DataType.FP32, (-1, 1)), TensorSpec("y", DataType.FP32, (-1, 1))), Y)
    assert sample(Columns("t", ["y", "labels"], named)) == {"labels": [1], "y": [0]}
