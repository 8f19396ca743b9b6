"""Messages between the two ends of a connection."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.pipeline.streaming.step_process import MessageMemory, StepChannel


@pytest.fixture
def ends() -> Iterator[tuple[StepChannel, StepChannel]]:
    one, two = socket.socketpair()
    files = [os.memfd_create(name) for name in ("there", "back")]
    copies = [os.dup(file) for file in files]
    first = StepChannel(one, MessageMemory(files[0]), MessageMemory(files[1]))
    second = StepChannel(two, MessageMemory(copies[1]), MessageMemory(copies[0]))
    yield first, second
    first.close()
    second.close()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 100_000])
def test_arrays_pass_both_ways_and_are_writable_copies(ends: tuple[StepChannel, StepChannel], size: int) -> None:
    first, second = ends
    array = np.arange(size, dtype=np.float32)
    first.send({"a": array, "b": array[::-1].copy(), "text": "é"})
    found = second.receive()
    np.testing.assert_array_equal(found["a"], array)
    np.testing.assert_array_equal(found["b"], array[::-1])
    assert found["text"] == "é"
    found["a"][:] = 7
    second.send(found["a"])
    np.testing.assert_array_equal(first.receive(), np.full(size, 7, np.float32))


def test_a_message_does_not_change_when_the_next_one_comes(ends: tuple[StepChannel, StepChannel]) -> None:
    first, second = ends
    first.send(np.zeros(1000))
    found = second.receive()
    first.send(np.ones(200_000))
    assert second.receive().all()
    assert not found.any()


def test_a_closed_end_is_the_end_of_the_messages(ends: tuple[StepChannel, StepChannel]) -> None:
    first, second = ends
    second.close()
    second.close()
    with pytest.raises((EOFError, OSError)):
        first.receive()
