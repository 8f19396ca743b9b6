from __future__ import annotations

import onnx
import pytest

from penstock.errors import Unsupported
from penstock.offline.compress.training.operators import OPERATORS
from penstock.offline.compress.training.operators.registry import Node, call, ints
from penstock.offline.compress.training.torch import torch

NODE = Node("Op", ("x",), ("y",), {"axis": 1, "name": "text"}, 18)


def test_attributes_have_defaults() -> None:
    assert (NODE.get("axis"), NODE.get("other"), NODE.get("other", 5)) == (1, None, 5)


def test_integers_come_from_the_input_or_else_from_the_attribute() -> None:
    node = Node("ReduceSum", ("x",), ("y",), {"axes": [0]}, 11)
    assert node.ints("axes", None) == [0]
    assert node.ints("axes", torch.tensor([[1], [2]])) == [1, 2]
    assert NODE.ints("axes", None) is None
    assert ints(torch.tensor(7)) == [7]


def test_what_cannot_be_trained_names_the_node() -> None:
    error = NODE.unsupported("its mode")
    assert isinstance(error, Unsupported)
    assert error.message == "'y' (Op): its mode cannot be trained"


def test_a_function_is_given_the_attributes_that_it_takes_by_keyword() -> None:
    def function(x: int, y: int = 0, *, axis: int = 0, keep: int = 7) -> tuple[int, ...]:
        return x, y, axis, keep

    assert call(function, NODE, 1, 2) == (1, 2, 1, 7)
    assert call(abs, NODE, -3) == 3


def test_the_table_holds_operators_of_onnx_with_inputs_that_they_have() -> None:
    for (domain, name), operator in OPERATORS.items():
        if domain:
            continue
        schema = onnx.defs.get_schema(name)
        listed = operator.weights | (operator.fixed or frozenset())
        assert all(position < schema.max_input for position in listed), name
        assert not operator.weights & (operator.fixed or frozenset()), name


@pytest.mark.parametrize(("name", "weights"), [("Conv", {1, 2}), ("MatMul", {1}), ("Relu", set())])
def test_weights_of_layers_are_known_whatever_their_size(name: str, weights: set[int]) -> None:
    assert OPERATORS["", name].weights >= weights if weights else OPERATORS["", name].weights == frozenset()
