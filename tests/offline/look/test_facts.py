from __future__ import annotations

import pytest

from penstock.offline.look.facts import FileFacts, TensorFacts, elements, sorted_counts
from penstock.tensor import DataType, Signature, TensorSpec


def test_a_tensor_of_a_known_type_and_shape_has_a_spec() -> None:
    assert TensorFacts("x", "FP32", (-1, 3)).spec == TensorSpec("x", DataType.FP32, (-1, 3))
    assert TensorFacts("x", "seq(tensor(FP32))", (-1,)).spec is None
    assert TensorFacts("x", "FP32", None).spec is None


def test_a_file_has_a_signature_only_if_all_tensors_are_known() -> None:
    x, y, odd = TensorFacts("x", "FP32", ()), TensorFacts("y", "INT64", (2,)), TensorFacts("z", "map", None)
    signature = FileFacts((x,), (y,)).signature
    assert signature == Signature((TensorSpec("x", DataType.FP32, ()),), (TensorSpec("y", DataType.INT64, (2,)),))
    assert FileFacts((x,), (y, odd)).signature is None
    assert FileFacts().signature is None


@pytest.mark.parametrize(("shape", "count"), [((), 1), ((2, 3), 6), ((2, -1), 0), ((0, 5), 0)])
def test_elements(shape: tuple[int, ...], count: int) -> None:
    assert elements(shape) == count


def test_counts_are_sorted_by_number_then_by_name() -> None:
    assert list(sorted_counts({"b": 1, "c": 5, "a": 1})) == ["c", "a", "b"]
