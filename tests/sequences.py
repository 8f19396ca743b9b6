"""Requests of sequences, and models that remember what they were asked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import models
from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.request import InferRequest
from penstock.tensor import Array, DataType, Signature, TensorSpec

FP32, INT32, UINT64 = DataType.FP32, DataType.INT32, DataType.UINT64


def make_request(value: float, sequence: int | str = 1, start: bool = False, end: bool = False) -> InferRequest:
    request = InferRequest("m", {"x": np.full((1, 1), value, np.float32)}, "1")
    request.sequence_id, request.sequence_start, request.sequence_end = sequence, start, end
    return request


def implicit_accumulator() -> Artifact:
    """``y = state_out = x + (start ? 0 : state_in)``: the sum of a sequence, which the server keeps. START is INT32, 0 or 1."""
    column: list[int | str] = ["N", 1]
    tensor = (FP32.onnx, column)
    return models.artifact(
        [
            ("Equal", ["START", "one"], ["started"]),
            ("Where", ["started", "zero", "state_in"], ["before"]),
            ("Add", ["x", "before"], ["state_out"]),
            ("Identity", ["state_out"], ["y"]),
        ],
        [("x", *tensor), ("START", INT32.onnx, column), ("state_in", *tensor)],
        [("y", *tensor), ("state_out", *tensor)],
        {"zero": np.zeros((1, 1), np.float32), "one": np.ones(1, np.int32)},
    )


def controls_as_outputs() -> Artifact:
    """``y = x``, and each control that it is given."""
    column: list[int | str] = ["N", 1]
    given = {"START": INT32, "END": FP32, "READY": DataType.BOOL, "CORRID": UINT64}
    return models.artifact(
        [("Identity", [name], [f"{name}_given"]) for name in given] + [("Identity", ["x"], ["y"])],
        [(name, kind.onnx, column) for name, kind in given.items()] + [("x", FP32.onnx, column)],
        [(f"{name}_given", kind.onnx, column) for name, kind in given.items()] + [("y", FP32.onnx, column)],
    )


def _column(name: str, datatype: DataType = FP32) -> TensorSpec:
    return TensorSpec(name, datatype, (-1, 1))


class SlotSums(LoadedModel):
    """A model that keeps the sum of what each of its rows was given since its start: ``y``. A row that is not ready, or whose START
    is missing at first, must not change it. Asked for a negative number, it fails before it changes anything."""

    signature = Signature((_column("x"), _column("START", INT32), _column("READY", INT32)), (_column("y"),))
    reentrant = False

    def __init__(self, slots: int) -> None:
        self.sums: list[float | None] = [None] * slots
        self.calls: list[dict[str, Array]] = []

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.calls.append(dict(inputs))
        x, start, ready = (inputs[name][:, 0].tolist() for name in ("x", "START", "READY"))
        if any(is_ready and value < 0 for value, is_ready in zip(x, ready, strict=True)):
            raise ValueError("negative")
        answers = []
        for slot, value in enumerate(x):
            if ready[slot]:
                before = 0.0 if start[slot] else self.sums[slot]
                assert before is not None, "a sequence was never started in this slot"
                self.sums[slot] = before + value
            answers.append(self.sums[slot] or 0.0)
        return {"y": np.array(answers, np.float32)[:, None]}

    def unload(self) -> None:
        pass
