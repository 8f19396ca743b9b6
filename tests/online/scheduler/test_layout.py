from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidConfig, PenstockError
from penstock.online.repository.loading.scheduling import layout_of
from penstock.online.repository.triton.schema import typed
from penstock.online.scheduler.layout import BatchLayout, MergedRows, SingleRequest, merge, split
from penstock.online.scheduler.queue import Pending
from penstock.protocol.messages import ModelConfig
from penstock.request import InferRequest
from penstock.tensor import Array


class Nobody:
    def cancel(self, pending: Pending) -> None:
        raise AssertionError


def pending(rows: int = 1, **inputs: Array) -> Pending:
    return Pending(Nobody(), 0, InferRequest("m", inputs), rows, None, None, 0)


def layout(**fields: Any) -> BatchLayout:
    return layout_of(typed(json_format.ParseDict({"name": "m", "max_batch_size": 8} | fields, ModelConfig())))


def tensor(name: str, dims: Sequence[int], **fields: Any) -> dict[str, Any]:
    return {"name": name, "data_type": "TYPE_FP32", "dims": list(dims)} | fields


def run(
    one: BatchLayout, requests: Sequence[Pending], model: Callable[[Any], dict[str, Array]]
) -> list[dict[str, Array]]:
    return one.scatter(requests, model(one.gather(requests)))


def test_what_needs_nothing_special_gets_the_plain_layouts() -> None:
    plain = [tensor("x", [2], optional=True)]
    assert isinstance(layout(input=plain), MergedRows)
    assert isinstance(layout(input=plain, max_batch_size=0), SingleRequest)
    assert isinstance(layout(input=plain, model_transaction_policy={"decoupled": True}), SingleRequest)


def test_a_lone_request_and_its_outputs_are_passed_on_as_they_are() -> None:
    request, outputs = pending(x=np.zeros(3)), {"y": np.zeros(5)}
    assert SingleRequest().gather([request]) is request.request.inputs
    assert SingleRequest().scatter([request], outputs)[0] is outputs


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.integers(0, 3),
    st.sampled_from([([-1, 6], [-1, 2, 3]), ([6, -1], [-1]), ([1, -1, 6], [2, 3, -1]), ([1], []), ([6], [3, 2])]),
)
def test_with_reshapes_each_gets_what_it_would_get_alone(
    rows: list[int], free: int, shapes: tuple[list[int], list[int]]
) -> None:
    outside, inside = shapes
    if outside == [6, -1]:
        outside, inside = [-1, 1], [-1]
    one = layout(
        input=[tensor("x", outside, reshape={"shape": inside})],
        output=[tensor("y", outside, reshape={"shape": inside})],
    )
    seen: list[tuple[int, ...]] = []

    def model(inputs: dict[str, Array]) -> dict[str, Array]:
        seen.append(inputs["x"].shape)
        return {"y": inputs["x"] * 2}

    random = np.random.default_rng(0)
    requests = [
        pending(n, x=random.standard_normal((n, *(free if dim == -1 else dim for dim in outside)))) for n in rows
    ]
    for request, part in zip(requests, run(one, requests, model), strict=True):
        np.testing.assert_array_equal(part["y"], request.request.inputs["x"] * 2)
        np.testing.assert_array_equal(part["y"], run(one, [request], model)[0]["y"])
    assert all(shape[1:] == tuple(free if dim == -1 else dim for dim in inside) for shape in seen)


def test_without_batches_reshapes_have_no_batch_dimension() -> None:
    one = layout(
        max_batch_size=0,
        input=[tensor("x", [-1, 2], reshape={"shape": [2, -1]})],
        output=[tensor("y", [1, 2, -1], reshape={"shape": [2, -1]})],
    )
    request = pending(x=np.arange(6).reshape(3, 2))
    assert one.gather([request])["x"].shape == (2, 3)
    assert run(one, [request], lambda inputs: {"y": inputs["x"]})[0]["y"].shape == (1, 2, 3)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_ragged_requests_of_an_elementwise_model_get_what_they_would_get_alone(lengths: list[int]) -> None:
    one = layout(
        input=[tensor("x", [-1], allow_ragged_batch=True), tensor("scale", [1])],
        output=[tensor("y", [-1]), tensor("z", [1])],
        batch_input=[
            {"kind": "BATCH_ELEMENT_COUNT", "target_name": ["count"], "data_type": "TYPE_INT32", "source_input": ["x"]}
        ],
        batch_output=[{"target_name": ["y"], "source_input": ["x"]}],
    )
    assert one.is_ragged

    def model(inputs: dict[str, Array]) -> dict[str, Array]:
        assert inputs["x"].ndim == 1
        factor = np.repeat(inputs["scale"][:, 0], inputs["count"])
        return {"y": inputs["x"] * factor, "z": inputs["scale"] + 1}

    requests = [
        pending(x=np.arange(length, dtype=np.float32)[None], scale=np.full((1, 1), number, np.float32))
        for number, length in enumerate(lengths)
    ]
    for number, part in enumerate(run(one, requests, model)):
        np.testing.assert_array_equal(part["y"], requests[number].request.inputs["x"] * number)
        np.testing.assert_array_equal(part["z"], [[number + 1]])
        np.testing.assert_array_equal(part["y"], run(one, requests[number : number + 1], model)[0]["y"])


@pytest.mark.parametrize("datatype", ["TYPE_INT32", "TYPE_FP32"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [6, 4, 1]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 10, 11]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 10, 11]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 6),
        ("BATCH_ITEM_SHAPE", [[3, 1], [3, 1], [2, 2], [1, 1]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 1, 3, 1, 2, 2, 1, 1]),
    ],
)
def test_inputs_made_from_the_batch(kind: str, expected: list[Any], datatype: str) -> None:
    one = layout(
        input=[tensor("x", [-1, -1], allow_ragged_batch=True)],
        batch_input=[{"kind": kind, "target_name": ["a", "b"], "data_type": datatype, "source_input": ["x"]}],
    )
    requests = [pending(len(x), x=x) for x in (np.zeros((2, 3, 1)), np.zeros((1, 2, 2)), np.zeros((1, 1, 1)))]
    gathered = one.gather(requests)
    assert gathered["x"].shape == (11,)
    assert gathered["a"].dtype == (np.int32 if datatype == "TYPE_INT32" else np.float32)
    np.testing.assert_array_equal(gathered["a"], expected)
    np.testing.assert_array_equal(gathered["b"], expected)


def test_what_is_made_of_an_input_that_was_left_out_is_left_out_too() -> None:
    one = layout(
        input=[tensor("x", [2]), tensor("w", [-1], optional=True, allow_ragged_batch=True)],
        batch_input=[{"target_name": ["n"], "data_type": "TYPE_INT32", "source_input": ["w"]}],
    )
    assert set(one.gather([pending(x=np.zeros((1, 2)))])) == {"x"}
    assert set(one.gather([pending(x=np.zeros((1, 2)), w=np.zeros((1, 3)))])) == {"x", "w", "n"}


def test_outputs_that_do_not_fit_are_refused() -> None:
    one = layout(
        input=[tensor("x", [-1], allow_ragged_batch=True)],
        output=[tensor("y", [-1]), tensor("z", [2], reshape={"shape": [1, 2]})],
        batch_output=[{"target_name": ["y"], "source_input": ["x"]}],
    )
    requests = [pending(x=np.zeros((1, 3))), pending(x=np.zeros((1, 1)))]
    with pytest.raises(PenstockError, match="output 'y' has 5 elements, but the shapes of the inputs require 4"):
        one.scatter(requests, {"y": np.zeros(5)})
    with pytest.raises(PenstockError, match=r"output 'z' has shape \[2, 2\], but 'reshape' is for \[-1, 1, 2\]"):
        one.scatter(requests, {"z": np.zeros((2, 2))})
    with pytest.raises(PenstockError, match="for a batch of 2"):
        one.scatter(requests, {"z": np.zeros((1, 1, 2))})


def test_outputs_cannot_take_dimensions_that_the_input_has_not() -> None:
    with pytest.raises(InvalidConfig, match="output 'y' has more dimensions than input 'x'"):
        layout(
            input=[tensor("x", [-1])],
            output=[tensor("y", [-1, -1])],
            batch_output=[{"target_name": ["y"], "source_input": ["x"]}],
        )


def inputs(rows: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"x": random.standard_normal((rows, 3)), "ids": random.integers(0, 9, (rows,))}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_split_undoes_merge(rows: list[int]) -> None:
    requests = [inputs(count, seed) for seed, count in enumerate(rows)]
    for given_back, sent in zip(split(merge(requests), rows), requests, strict=True):
        for name in sent:
            np.testing.assert_array_equal(given_back[name], sent[name])


def test_a_single_request_is_not_copied() -> None:
    single = inputs(2, 0)
    assert merge([single])["x"] is single["x"]


@pytest.mark.parametrize("shape", [(3, 2), (), (5,)])
def test_outputs_that_do_not_follow_the_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PenstockError, match="output 'y' has shape"):
        split({"y": np.zeros(shape)}, [1, 1])
