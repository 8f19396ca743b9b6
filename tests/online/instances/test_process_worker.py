from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import pytest

from penstock.errors import ResourceExhausted
from penstock.online.instances.process_channel import Failed, Forward, Forwarded
from penstock.online.instances.process_worker import run
from penstock.online.instances.tensor_arena import TensorArena
from penstock.tensor import Array
from penstock.testing import DOUBLER, FakeModel


def answer(model: FakeModel, x: Array, most: int = 1 << 20) -> tuple[Forwarded | Failed, TensorArena]:
    ours, outputs = TensorArena.create(), TensorArena.create(max_bytes=most)
    return run(model, Forward(ours.write({"x": x})), TensorArena(os.dup(ours.file)), outputs), outputs


def test_outputs_are_left_where_the_parent_finds_them() -> None:
    message, outputs = answer(FakeModel(), np.ones((3, 2), np.float32))
    assert isinstance(message, Forwarded)
    np.testing.assert_array_equal(outputs.copy(message.outputs)["y"], np.full((3, 2), 2, np.float32))


def test_the_model_cannot_write_to_its_inputs() -> None:
    def forward(inputs: Mapping[str, Array]) -> dict[str, Array]:
        inputs["x"][0] = 5
        return {}

    message, _ = answer(FakeModel(DOUBLER, forward), np.ones((3, 2), np.float32))
    assert message == Failed("PenstockError", "the model failed: ValueError", "")


def test_what_a_model_raises_is_told_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    def forward(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise RuntimeError("a secret path")

    message, _ = answer(FakeModel(DOUBLER, forward), np.ones((3, 2), np.float32))
    assert message == Failed("PenstockError", "the model failed: RuntimeError", "")
    assert "a secret path" in caplog.text


def test_outputs_that_are_too_large_are_an_error() -> None:
    message, _ = answer(FakeModel(), np.ones((1 << 18, 2), np.float32))
    assert isinstance(message, Failed)
    assert message.kind == ResourceExhausted.__name__
