from __future__ import annotations

import inspect
import socket
from collections.abc import Iterator
from threading import Thread

import pytest

from penstock import errors
from penstock.errors import EngineUnavailable, PenstockError, Unavailable
from penstock.online.instances.process_channel import Channel, Failed, Forward, Forwarded, Load, Loaded, Message
from penstock.online.instances.tensor_arena import TensorSlot
from penstock.tensor import DataType
from penstock.testing import DOUBLER

SLOT = TensorSlot("x", DataType.BF16, (2, 0, 3), 64, 12)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    channels = Channel(ours), Channel(theirs)
    yield channels
    for channel in channels:
        channel.close()


@pytest.mark.parametrize(
    "message",
    [
        Load("onnxruntime", "onnx", "d", "", {"threads": 1, "providers": ["a"]}, (0, 2)),
        Loaded(DOUBLER),
        Forward([SLOT]),
        Forwarded([]),
        Failed("NotFound", "m", "h"),
        Forward([SLOT] * 20_000),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_arrive_as_they_were_sent(ends: tuple[Channel, Channel], message: Message) -> None:
    sender = Thread(target=ends[0].send, args=(message,))
    sender.start()
    assert ends[1].receive() == message
    sender.join()


def test_the_end_is_told_from_a_message(ends: tuple[Channel, Channel]) -> None:
    ends[0].socket.sendall(b"\x10\x00\x00\x00half")
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive()


ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PenstockError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_comes_back_as_itself(kind: type[PenstockError]) -> None:
    if kind is EngineUnavailable:
        error: PenstockError = EngineUnavailable("x", "pip")
        back = Failed.of(error).error()
        assert type(back) is Unavailable
    else:
        error = kind("message", "hint")
        back = Failed.of(error).error()
        assert type(back) is kind
    assert (back.message, back.hint) == (error.message, error.hint)


def test_an_unknown_error_is_an_internal_one() -> None:
    assert type(Failed("Exception", "m", "").error()) is PenstockError
