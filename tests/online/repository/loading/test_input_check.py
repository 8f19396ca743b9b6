import msgspec
import numpy as np
import pytest

from penstock.errors import InvalidArgument
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.loading.input_check import InputCheck
from penstock.online.repository.triton.auto_complete import complete
from penstock.online.repository.triton.check import parse
from penstock.request import InferRequest
from penstock.tensor import DataType, Signature, TensorSpec

SIGNATURE = Signature(
    inputs=(TensorSpec("x", DataType.FP32, (-1, 3)), TensorSpec("ids", DataType.INT64, (-1, -1))),
    outputs=(TensorSpec("y", DataType.FP32, (-1, 3)),),
)


def checked(signature: Signature, rows: int | None) -> InputCheck:
    return InputCheck(complete(ModelConfig(), "m", "fake", signature, rows, 1), 8)


def request(**changes: object) -> InferRequest:
    inputs = {"x": np.zeros((2, 3), np.float32), "ids": np.zeros((2, 5), np.int64)}
    return InferRequest("m", {name: array for name, array in (inputs | changes).items() if array is not None})


def test_rows_and_what_must_be_equal_to_be_merged() -> None:
    check = checked(SIGNATURE, 8)
    assert check(request()) == (2, ((3,), (5,)))
    assert checked(SIGNATURE, None)(request()) == (1, None)


def test_models_of_fixed_rows_merge_without_comparing() -> None:
    signature = Signature(SIGNATURE.inputs[:1], SIGNATURE.outputs)
    assert checked(signature, 8)(InferRequest("m", {"x": np.zeros((4, 3), np.float32)})) == (4, None)


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
        checked(SIGNATURE, 8)(request(**changes))
    assert caught.value.message.startswith("[request id: <id_unknown>] ")


def test_unknown_outputs_are_refused_with_the_requests_id() -> None:
    asked = request()
    asked.id, asked.outputs = "7", ("y", "w")
    with pytest.raises(InvalidArgument, match=r"\[request id: 7\] unexpected inference output 'w' for model 'm'"):
        checked(SIGNATURE, 8)(asked)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "n" * 10_000])
def test_names_and_ids_of_a_client_are_shown_in_one_short_line(name: str) -> None:
    for asked in (request(**{name: np.zeros(1)}), request(x=None, **{name * 2: np.zeros(1)}), request()):
        asked.id, asked.outputs = name, (name,)
        with pytest.raises(InvalidArgument) as caught:
            checked(SIGNATURE, 8)(asked)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500


def config() -> ModelConfig:
    inputs = [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [3]},
        {"name": "w", "data_type": "TYPE_STRING", "dims": [-1], "optional": True},
        {"name": "r", "data_type": "TYPE_INT64", "dims": [-1], "optional": True, "allow_ragged_batch": True},
    ]
    outputs = [{"name": "y", "data_type": "TYPE_FP32", "dims": [3], "reshape": {"shape": [3, 1]}}]
    return parse("m", {"max_batch_size": 8, "input": inputs, "output": outputs})


def test_clients_see_the_configured_shapes_with_the_batch_in_front() -> None:
    signature = config().client_signature
    assert signature.inputs[1] == TensorSpec("w", DataType.BYTES, (-1, -1))
    assert signature.outputs == (TensorSpec("y", DataType.FP32, (-1, 3)),)
    assert msgspec.structs.replace(config(), max_batch_size=0).client_signature.inputs[0].shape == (3,)


def sent(**lengths: int) -> InferRequest:
    """``x`` with the rows given, the others with as many and the length given."""
    rows = lengths.pop("rows", 2)
    kinds = {"x": np.float32, "w": np.object_, "r": np.int64}
    return InferRequest("m", {name: np.zeros((rows, length), kinds[name]) for name, length in lengths.items()})


def test_requests_with_other_optional_inputs_are_not_merged_and_ragged_ones_of_other_shapes_are() -> None:
    check = InputCheck(config(), 8)
    alone, text, longer = check(sent(x=3)), check(sent(x=3, w=1)), check(sent(x=3, w=2))
    ragged, other = check(sent(x=3, r=1, rows=1)), check(sent(r=7, x=3, rows=1))
    assert ragged == other
    assert [one[0] for one in (alone, text, longer, ragged)] == [2, 2, 2, 1]
    assert len({one[1] for one in (alone, text, longer, ragged)}) == 4


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            sent(w=1),
            r"expected number of inputs between 1 and 3 but got 1 inputs .* missing required input\(s\) \['x'\]",
        ),
        (sent(), "expected number of inputs between 1 and 3 but got 0 inputs"),
        (InferRequest("m", sent(x=3, w=1, r=1).inputs | {"z": np.zeros(1)}), "unexpected inference input 'z'"),
        (InferRequest("m", sent(x=3).inputs | {"z": np.zeros(1)}), "unexpected inference input 'z'"),
        (InferRequest("m", sent(x=3).inputs | sent(r=3, rows=1).inputs), "input 'r' batch size does not match"),
        (InferRequest("m", sent(x=3).inputs | {"r": np.zeros((2, 1, 1), np.int64)}), "unexpected shape for input 'r'"),
        (sent(x=3, rows=9), "batch-size must be <= 8"),
    ],
    ids=["required", "none", "one too many", "unknown in place of optional", "rows", "rank", "too many rows"],
)
def test_optional_inputs_are_checked_where_they_are_given(asked: InferRequest, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        InputCheck(config(), 8)(asked)


def test_a_model_with_nothing_but_optional_inputs_needs_one_of_them_where_it_has_rows() -> None:
    whole = msgspec.structs.replace(config(), input=config().input[1:])
    with pytest.raises(InvalidArgument, match="between 0 and 2 but got 0 inputs"):
        InputCheck(whole, 8)(sent())
    assert InputCheck(whole, 8)(sent(w=1))[0] == 2
    whole = msgspec.structs.replace(whole, max_batch_size=0)
    assert InputCheck(whole, 8)(sent()) == (1, None)


DEFAULT = TensorSpec("w", DataType.FP32, (3,))


def test_inputs_with_a_default_may_be_given_and_are_then_merged_with_no_other() -> None:
    check = InputCheck(complete(ModelConfig(), "m", "fake", SIGNATURE, 8, 1), 8, [DEFAULT])
    assert check(request()) == (2, ((3,), (5,)))
    asked = request(w=np.zeros(3, np.float32))
    (rows, first), (_, second) = check(asked), check(asked)
    assert rows == 2
    assert first != second
    assert InputCheck(complete(ModelConfig(), "m", "fake", SIGNATURE, None, 1), 8, [DEFAULT])(asked) == (1, None)


@pytest.mark.parametrize("array", [np.zeros(2, np.float32), np.zeros(3, np.int64)])
def test_what_does_not_fit_a_default_is_refused(array: np.ndarray) -> None:
    check = InputCheck(complete(ModelConfig(), "m", "fake", SIGNATURE, 8, 1), 8, [DEFAULT])
    with pytest.raises(InvalidArgument, match=r"input 'w' of model 'm' must be FP32 \[3\], got"):
        check(request(w=array))
    with pytest.raises(InvalidArgument, match="unexpected inference input 'v'"):
        check(request(v=array))
