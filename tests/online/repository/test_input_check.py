import numpy as np
import pytest

from penstock.errors import InvalidArgument
from penstock.online.repository.input_check import InputCheck
from penstock.request import InferRequest
from penstock.tensor import DataType, Signature, TensorSpec

SIGNATURE = Signature(
    inputs=(TensorSpec("x", DataType.FP32, (-1, 3)), TensorSpec("ids", DataType.INT64, (-1, -1))),
    outputs=(TensorSpec("y", DataType.FP32, (-1, 3)),),
)


def request(**changes: object) -> InferRequest:
    inputs = {"x": np.zeros((2, 3), np.float32), "ids": np.zeros((2, 5), np.int64)}
    return InferRequest("m", {name: array for name, array in (inputs | changes).items() if array is not None})


def test_rows_and_what_must_be_equal_to_be_merged() -> None:
    check = InputCheck("m", SIGNATURE, max_rows=8)
    assert check(request()) == (2, ((3,), (5,)))
    assert InputCheck("m", SIGNATURE, max_rows=None)(request()) == (1, None)


def test_models_of_fixed_rows_merge_without_comparing() -> None:
    signature = Signature(SIGNATURE.inputs[:1], SIGNATURE.outputs)
    assert InputCheck("m", signature, 8)(InferRequest("m", {"x": np.zeros((4, 3), np.float32)})) == (4, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": None}, r"expected 2 inputs but got 1 inputs for model 'm'. Got input\(s\) \['x'\], but missing"),
        ({"z": np.zeros(1)}, "unexpected inference input 'z' for model 'm'"),
        ({"ids": None, "z": np.zeros(1)}, "unexpected inference input 'z'"),
        ({"x": np.zeros((2, 3))}, "inference input 'x' data-type is 'FP64', but model 'm' expects 'FP32'"),
        ({"x": np.zeros((2, 4), np.float32)}, r"unexpected shape for input 'x' for model 'm'. Expected \[-1, 3\]"),
        ({"x": np.zeros(3, np.float32)}, "unexpected shape for input 'x'"),
        ({"ids": np.zeros((3, 5), np.int64)}, "input 'ids' batch size does not match other inputs for 'm'"),
        (
            {"x": np.zeros((9, 3), np.float32), "ids": np.zeros((9, 5), np.int64)},
            "inference request batch-size must be <= 8 for 'm'",
        ),
        (
            {"x": np.zeros((0, 3), np.float32), "ids": np.zeros((0, 5), np.int64)},
            "inference request batch-size must be >= 1 for 'm'",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        InputCheck("m", SIGNATURE, max_rows=8)(request(**changes))
    assert caught.value.message.startswith("[request id: <id_unknown>] ")


def test_unknown_outputs_are_refused_with_the_requests_id() -> None:
    asked = request()
    asked.id, asked.outputs = "7", ("y", "w")
    with pytest.raises(InvalidArgument, match=r"\[request id: 7\] unexpected inference output 'w' for model 'm'"):
        InputCheck("m", SIGNATURE, max_rows=8)(asked)
