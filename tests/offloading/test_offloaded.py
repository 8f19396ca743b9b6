"""A model on both sides: who answers, what happens when a side fails, and that the answers are compared."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.errors import InvalidArgument, PenstockError, ResourceExhausted, Unavailable
from penstock.offloading.offloaded import OffloadedModel, OffloadOptions
from penstock.offloading.server import ServedModel
from penstock.runtime import Model
from penstock.tensor import Array, Signature
from penstock.testing import DOUBLER, FakeModel, double

_X = {"x": np.ones((1, 2), np.float32)}


class _Clock:
    """Time that each side moves by what its call takes."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class _Server:
    """A server whose answers the test gives. ``auto`` are seconds per call; None: the test answers."""

    name, address = "double", SimpleNamespace(url="http://server")

    def __init__(self, clock: _Clock, auto: float | None) -> None:
        self.clock, self.auto, self.factor = clock, auto, 2.0
        self.signature_: Signature = DOUBLER
        self.error: PenstockError | None = None
        self.asked: list[Future[dict[str, Array]]] = []
        self.arrived = threading.Event()

    def signature(self) -> Signature:
        return self.signature_

    def infer(self, inputs: Mapping[str, Array]) -> Future[dict[str, Array]]:
        future: Future[dict[str, Array]] = Future()
        self.asked.append(future)
        self.arrived.set()
        if self.error is not None:
            future.set_exception(self.error)
        elif self.auto is not None:
            self.clock.time += self.auto
            future.set_result({"y": inputs["x"] * np.float32(self.factor)})
        return future

    def close(self) -> None:
        for future in self.asked:
            future.cancel()


class _Pair:
    def __init__(self, device_s: float, server_s: float | None, forward: Any = double) -> None:
        self.clock = _Clock()
        self.server = _Server(self.clock, server_s)

        def timed(inputs: Mapping[str, Array]) -> dict[str, Array]:
            self.clock.time += device_s
            found: dict[str, Array] = forward(inputs)
            return found

        self.engine = FakeModel(DOUBLER, timed)
        self.model = OffloadedModel(
            Model("double", self.engine), cast(ServedModel, self.server), OffloadOptions(), self.clock
        )

    def calls(self, count: int) -> None:
        """Calls, each after all background work of the one before."""
        for _ in range(count):
            np.testing.assert_array_equal(self.model.infer(_X)["y"], _X["x"] * 2)
            self.model._workers.submit(int).result()
            while not self.model._probing.acquire(blocking=False):
                self.server.arrived.wait(0.01)
            self.model._probing.release()


@pytest.fixture
def pairs() -> Iterator[Any]:
    made: list[_Pair] = []

    def make(*arguments: Any) -> _Pair:
        made.append(_Pair(*arguments))
        return made[-1]

    yield make
    for pair in made:
        pair.model.close()


@pytest.mark.parametrize(("device", "server", "winner"), [(0.1, 0.01, "server"), (0.01, 0.1, "device")])
def test_the_faster_side_answers(pairs: Any, device: float, server: float, winner: str) -> None:
    pair = pairs(device, server)
    pair.calls(200)
    assert getattr(pair.model.counts, winner) >= 195
    assert pair.model.predicted_ms(_X) == {"device": pytest.approx(device * 1e3), "server": pytest.approx(server * 1e3)}


@pytest.mark.parametrize(("before", "after"), [(0.01, 1.0), (1.0, 0.01)])
def test_a_link_that_changes_is_followed(pairs: Any, before: float, after: float) -> None:
    pair = pairs(0.1, before)
    pair.calls(20)
    pair.server.auto = after
    pair.calls(250)
    start = pair.model.counts.server
    pair.calls(20)
    assert pair.model.counts.server - start == (20 if after < 0.1 else 0)


@pytest.mark.parametrize("error", [Unavailable("cut"), InvalidArgument("refused, but the device accepts it")])
def test_a_server_that_fails_is_replaced_by_the_device_and_tried_again(pairs: Any, error: PenstockError) -> None:
    pair = pairs(0.1, 0.01)
    pair.calls(20)
    pair.server.error = error
    pair.calls(3)
    assert pair.model.counts.fallbacks == 1
    assert pair.model.server_error == str(error)
    pair.server.error = None
    pair.calls(30)
    assert pair.model.server_error == ""
    answered = pair.model.counts.server
    pair.calls(5)
    assert pair.model.counts.server == answered + 5


def test_a_link_that_hangs_is_answered_by_the_device(pairs: Any) -> None:
    pair = pairs(0.1, 0.001)
    pair.calls(20)
    pair.server.auto = None
    np.testing.assert_array_equal(pair.model.infer(_X)["y"], _X["x"] * 2)
    assert pair.model.counts.fallbacks == 1
    assert pair.server.asked[-1].cancelled()


def test_the_server_answers_if_the_device_fails(pairs: Any) -> None:
    def full(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise ResourceExhausted("no memory")

    pair = pairs(0.1, 0.01, full)
    np.testing.assert_array_equal(pair.model.infer(_X)["y"], _X["x"] * 2)


@pytest.mark.parametrize("answers", [True, False])
def test_a_late_server_answers_if_the_device_fails(pairs: Any, answers: bool) -> None:
    has_failed = threading.Event()
    fails = False

    def forward(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if not fails:
            return double(inputs)
        has_failed.set()
        raise ResourceExhausted("no memory")

    pair = pairs(0.1, 0.001, forward)
    pair.calls(20)
    pair.server.auto, fails = None, True
    pair.server.arrived.clear()

    def late() -> None:
        pair.server.arrived.wait()
        has_failed.wait()
        if answers:
            pair.server.asked[-1].set_result({"y": _X["x"] * 2})
        else:
            pair.server.asked[-1].set_exception(Unavailable("cut"))

    thread = threading.Thread(target=late)
    thread.start()
    if answers:
        np.testing.assert_array_equal(pair.model.infer(_X)["y"], _X["x"] * 2)
    else:
        with pytest.raises(ResourceExhausted):
            pair.model.infer(_X)
    thread.join()


def test_wrong_inputs_are_an_error_of_the_caller(pairs: Any) -> None:
    with pytest.raises(InvalidArgument, match="data-type"):
        pairs(0.1, 0.01).model.infer({"x": np.ones((1, 2))})


def test_a_server_with_other_answers_is_never_used_again(pairs: Any, caplog: pytest.LogCaptureFixture) -> None:
    pair = pairs(0.1, 0.01)
    pair.server.factor = 2.1
    pair.model.infer(_X)
    pair.calls(50)
    assert pair.model.counts.server == 0
    assert "differs" in pair.model.server_error
    assert "http://server is not used" in caplog.text


def test_a_server_with_another_signature_is_never_asked(pairs: Any) -> None:
    pair = pairs(0.1, 0.01)
    pair.server.signature_ = Signature(DOUBLER.inputs, ())
    pair.calls(50)
    assert not pair.server.asked
    assert "output 'y'" in pair.model.server_error
