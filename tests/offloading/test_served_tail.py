"""A head on this device and a tail elsewhere, which the test plays."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from penstock.errors import Cancelled, InvalidArgument, Unavailable
from penstock.offloading.served_tail import ServedTail
from penstock.tensor import Array, DataType, Signature, TensorSpec

X = np.array([1, 2], np.float32)
TIMEOUT_S = 30


class Head:
    """Doubles its input."""

    signature = Signature((TensorSpec("x", DataType.FP32, (2,)),), (TensorSpec("part", DataType.FP32, (2,)),))

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if "x" not in inputs:
            raise InvalidArgument("input 'x' is missing")
        return {"part": inputs["x"] * 2}

    def close(self) -> None:
        pass


class Tail:
    """Keeps each request until the test answers."""

    name, address = "tail", None

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.inputs: Mapping[str, Array] = {}
        self.answer: Future[dict[str, Array]] = Future()

    def infer(self, inputs: Mapping[str, Array]) -> Future[dict[str, Array]]:
        self.inputs = inputs
        self.asked.set()
        return self.answer

    def signature(self) -> Signature:
        return Signature((), (TensorSpec("y", DataType.FP32, (2,)),))

    def close(self) -> None:
        pass


@pytest.fixture
def tail() -> Tail:
    return Tail()


@pytest.fixture
def whole(tail: Tail) -> Iterator[ServedTail]:
    head: Any = Head()
    served: Any = tail
    found = ServedTail(head, served)
    yield found
    found.close()


def test_the_tail_gets_the_output_of_the_head(whole: ServedTail, tail: Tail) -> None:
    told = whole.infer({"x": X})
    assert tail.asked.wait(TIMEOUT_S)
    assert tail.inputs["part"].tolist() == [2, 4]
    tail.answer.set_result({"y": X})
    assert told.result(TIMEOUT_S)["y"] is X


def test_it_looks_like_the_whole_model(whole: ServedTail) -> None:
    found = whole.signature()
    assert [spec.name for spec in found.inputs] == ["x"]
    assert [spec.name for spec in found.outputs] == ["y"]


def test_errors_of_both_parts_are_told(whole: ServedTail, tail: Tail) -> None:
    with pytest.raises(InvalidArgument, match="input 'x' is missing"):
        whole.infer({}).result(TIMEOUT_S)
    assert not tail.asked.is_set()
    told = whole.infer({"x": X})
    tail.answer.set_exception(Unavailable("no server"))
    with pytest.raises(Unavailable, match="no server"):
        told.result(TIMEOUT_S)


def test_cancelling_the_whole_cancels_the_request(whole: ServedTail, tail: Tail) -> None:
    told = whole.infer({"x": X})
    assert tail.asked.wait(TIMEOUT_S)
    whole._worker.submit(lambda: None).result(TIMEOUT_S)  # the head's turn is over
    assert told.cancel()
    assert tail.answer.cancelled()


def test_a_cancelled_request_is_an_error(whole: ServedTail, tail: Tail) -> None:
    told = whole.infer({"x": X})
    assert tail.asked.wait(TIMEOUT_S)
    tail.answer.cancel()
    with pytest.raises(Cancelled):
        told.result(TIMEOUT_S)
