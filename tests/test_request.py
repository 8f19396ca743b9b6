from __future__ import annotations

import numpy as np
import pytest

from penstock.clock import ManualClock
from penstock.errors import Code, DeadlineExceeded
from penstock.request import Deadline, InferRequest, InferResponse


def test_deadline_passes_with_the_clock() -> None:
    clock = ManualClock(start=100)
    deadline = Deadline.after(0.25, clock)
    assert deadline.remaining(clock) == 0.25
    clock.advance(0.25)
    deadline.check(clock)  # the last moment is still in time
    clock.advance(0.125)
    assert deadline.remaining(clock) == -0.125
    with pytest.raises(DeadlineExceeded, match=r"passed 125\.0 ms ago") as caught:
        deadline.check(clock)
    assert caught.value.code is Code.DEADLINE_EXCEEDED


def test_requests_share_no_defaults() -> None:
    one, other = InferRequest("m", {}), InferRequest("m", {})
    one.parameters["priority"] = 1
    assert other.parameters == {}
    assert (one.model_version, one.id, one.outputs, one.deadline) == ("", "", (), None)


def test_response_echoes_what_it_is_given() -> None:
    response = InferResponse("m", "1", {"y": np.ones(1)}, id="a")
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "a")
