"""``models`` for PyTorch: the same traits, as TorchScript or as exported programs."""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Callable
from typing import Any

import torch

import models
from penstock.artifact import Artifact, Format
from penstock.tensor import DataType

TYPES = {
    DataType.BOOL: torch.bool,
    DataType.UINT8: torch.uint8,
    DataType.UINT16: torch.uint16,
    DataType.UINT32: torch.uint32,
    DataType.UINT64: torch.uint64,
    DataType.INT8: torch.int8,
    DataType.INT16: torch.int16,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.FP32: torch.float32,
    DataType.FP64: torch.float64,
}
Shape = tuple[int, ...]


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x}


class Linear(torch.nn.Module):
    def __init__(self, rows: int, columns: int, seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(models.linear_weight(rows, columns, seed)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x @ self.weight}


class Negative(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": -x}


class Mean(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x.mean((2, 3), keepdim=True)}


class SumAndDifference(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": a + b, "difference": a - b}


class InputAsOutput(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.relu(x), "x": x}


class Unread(torch.nn.Module):
    def forward(self, x: torch.Tensor, unread: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.relu(x)}


class Reshape(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x.reshape(-1, 4)}


class Increment(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x + 1}


def edited(
    archive: bytes,
    edit: Callable[[str, bytes], bytes],
    added: dict[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """A copy of a torch archive: ``edit`` gives each record's bytes; ``added`` are more records."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(changed, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, edit(name.partition("/")[2], old.read(name)))
        root = old.namelist()[0].partition("/")[0]
        for name, data in (added or {}).items():
            new.writestr(f"{root}/{name}", data)
    return changed.getvalue()


class Zoo:
    """``models`` as one format."""

    def __init__(self, make: Callable[..., Artifact]) -> None:
        self._make = make
        self.declared: dict[str, dict[str, Any]] = {}
        """By digest: the inputs and outputs of an artifact as options."""

    def _model(
        self,
        module: torch.nn.Module,
        inputs: dict[str, Shape],
        outputs: dict[str, Shape],
        datatype: DataType = DataType.FP32,
    ) -> Artifact:
        artifact = self._make(module, inputs, datatype)
        self.declared[artifact.digest] = {
            part: [{"name": name, "datatype": datatype.value, "shape": list(shape)} for name, shape in specs.items()]
            for part, specs in (("inputs", inputs), ("outputs", outputs))
        }
        return artifact

    def identity(self, datatype: DataType) -> Artifact:
        return self._model(Same(), {"x": (-1, 2)}, {"y": (-1, 2)}, datatype)

    @functools.cache  # noqa: B019 - a zoo lives as long as the tests
    def linear(self, rows: int = 3, columns: int = 2, seed: int = 0) -> Artifact:
        return self._model(Linear(rows, columns, seed), {"x": (-1, rows)}, {"y": (-1, columns)})

    def fixed_batch(self) -> Artifact:
        return self._model(Negative(), {"x": (1, 3)}, {"y": (1, 3)})

    def dynamic_image(self) -> Artifact:
        return self._model(Mean(), {"x": (-1, 2, -1, -1)}, {"y": (-1, 2, 1, 1)})

    def sum_and_difference(self) -> Artifact:
        pair = (-1, 2)
        return self._model(SumAndDifference(), {"a": pair, "b": pair}, {"sum": pair, "difference": pair})

    def input_as_output(self) -> Artifact:
        return self._model(InputAsOutput(), {"x": (-1, 2)}, {"y": (-1, 2), "x": (-1, 2)})

    def unread_input(self) -> Artifact:
        return self._model(Unread(), {"x": (-1, 2), "unread": (-1, 2)}, {"y": (-1, 2)})

    def fails_on_odd_batch(self) -> Artifact:
        return self._model(Reshape(), {"x": (-1, 2)}, {"y": (-1, 4)})

    def increment(self, datatype: DataType) -> Artifact:
        return self._model(Increment(), {"x": (-1,)}, {"y": (-1,)}, datatype)

    def unknown_operator(self) -> Artifact:
        good = self.linear()

        def edit(name: str, data: bytes) -> bytes:
            data = data.replace(b"torch.ops.aten.matmul", b"torch.ops.aten.Frobnicate")
            return data.replace(b"torch.matmul", b"torch.Frobnicate")

        bad = Artifact.from_bytes(edited(good.data, edit), good.format)
        self.declared[bad.digest] = self.declared[good.digest]
        return bad


def _script(module: torch.nn.Module, inputs: dict[str, Shape], datatype: DataType) -> Artifact:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module.eval()), buffer)
    return Artifact.from_bytes(buffer.getvalue(), Format.TORCHSCRIPT)


def _program(module: torch.nn.Module, inputs: dict[str, Shape], datatype: DataType) -> Artifact:
    examples = {
        name: torch.zeros([6 if dim == -1 else dim for dim in shape], dtype=TYPES[datatype])
        for name, shape in inputs.items()
    }
    free = {
        name: {place: torch.export.Dim.AUTO for place, dim in enumerate(shape) if dim == -1}
        for name, shape in inputs.items()
    }
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(module.eval(), (), examples, dynamic_shapes=free), buffer)
    return Artifact.from_bytes(buffer.getvalue(), Format.EXPORTED_PROGRAM)


SCRIPTS, PROGRAMS = Zoo(_script), Zoo(_program)
