from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import models
from penstock.errors import InvalidArgument, PenstockError
from penstock.online.instances.process_channel import Load
from penstock.online.instances.process_child import ProcessChild
from penstock.online.instances.tensor_arena import TensorArena

LOAD = Load("onnxruntime", "onnx", "", "", {"threads": 1}, ())


@pytest.fixture
def child() -> Iterator[ProcessChild]:
    files = models.linear().in_memory(), TensorArena.create().file, TensorArena.create().file
    before = len(os.listdir("/proc/self/fd"))
    child = ProcessChild(files)
    yield child
    child.kill()
    child.wait()
    assert len(os.listdir("/proc/self/fd")) == before
    for file in files:
        os.close(file)


def test_it_says_what_the_model_takes(child: ProcessChild) -> None:
    assert child.load(LOAD, print).signature.input_names == ["x"]


def test_what_it_cannot_load_is_told(child: ProcessChild) -> None:
    with pytest.raises(InvalidArgument, match="unknown engine 'none'"):
        child.load(Load("none", "onnx", "", "", {}, ()), print)


def test_a_death_while_it_loads_is_told(child: ProcessChild) -> None:
    child.kill()
    with pytest.raises(PenstockError, match="ended with signal SIGKILL while it loaded the model"):
        child.load(LOAD, print)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_how_it_ended(number: signal.Signals) -> None:
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    child = ProcessChild(files)
    os.kill(child.pid, number)
    assert child.wait() == f"signal {number.name}"
    for file in files:
        os.close(file)


def test_it_ends_when_asked(child: ProcessChild) -> None:
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    other = ProcessChild(files)
    other.ask_to_end()
    assert other.wait() == "exit status 0"
    assert not Path(f"/proc/{other.pid}").exists()
    assert child.load(LOAD, print).signature.input_names == ["x"], "another lives on"
    for file in files:
        os.close(file)
