"""The teacher: a model in ONNX Runtime. Its outputs for all data are stored; outputs for augmented inputs are computed when needed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnxruntime

from penstock.artifact import Artifact, sha256
from penstock.dataset import Dataset, make_dataset
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument, InvalidData, ResourceExhausted
from penstock.offline.compress.checkpoint import read_checkpoint, write_checkpoint
from penstock.offline.compress.training.torch import Tensor, torch
from penstock.offline.judge.accuracy import answers
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import loaded
from penstock.resources import usable_memory
from penstock.tensor import Array, DataType


class _Kept(msgspec.Struct, frozen=True):
    origin: str
    answers: dict[str, Array]


class Teacher:
    """The outputs of ``artifact`` for the rows of ``data``, computed once. Kept in memory and, if given, in the folder ``cache``."""

    def __init__(
        self,
        artifact: Artifact,
        data: Dataset,
        *,
        also: Collection[str] = (),
        cache: Path | None = None,
        live: bool = False,
    ) -> None:
        """``also`` names further FP32 tensors inside the graph. If ``live``, the teacher also computes outputs for the augmented
        inputs of the student.

        Raises InvalidArgument if a tensor is unknown, InvalidData if an output is NaN or infinite, ResourceExhausted if the outputs
        do not fit into memory.
        """
        self.digest = artifact.digest
        exposed = _expose(artifact, also)
        self._live = get_engine("onnxruntime").load(exposed, {"threads": 1}) if live else None
        self.answers = _answers(exposed, data, cache)
        """Outputs, with one row per sample. Floats of any type are stored as FP32."""
        self._tensors = {name: torch.tensor(array) for name, array in self.answers.items()}

    def __call__(self, tensors: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        """The outputs for a batch with the inputs ``tensors`` and the row numbers ``rows`` (int64 [n])."""
        if self._live is None:
            return {name: tensor[rows] for name, tensor in self._tensors.items()}
        inputs = {name: tensors[name].numpy() for name in self._live.signature.input_names}
        return {name: torch.tensor(array) for name, array in _run(self._live, make_dataset(inputs, None)).items()}


def _expose(artifact: Artifact, also: Collection[str]) -> Artifact:
    """``artifact`` with the tensors ``also`` as additional outputs."""
    if not also:
        return artifact
    proto = read_proto(artifact)
    if unknown := sorted(set(also) - {name for node in proto.graph.node for name in node.output}):
        raise InvalidArgument(f"the teacher has no tensor {unknown}", "take the names from its graph")
    outputs = [value.name for value in proto.graph.output]
    added = [name for name in dict.fromkeys(also) if name not in outputs]
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, DataType.FP32.onnx, None) for name in added)
    return artifact_of(proto)


def _answers(artifact: Artifact, data: Dataset, cache: Path | None) -> dict[str, Array]:
    origin = f"{artifact.digest} {data.digest} {onnxruntime.__version__}"
    file = None if cache is None else cache / f"teacher-{sha256(origin.encode())[:32]}.kept"
    if file is not None:
        with contextlib.suppress(InvalidArgument):  # a damaged file is replaced
            found = read_checkpoint(file, _Kept)
            if found is not None and found.origin == origin:
                return found.answers
    with loaded(artifact) as model:
        _check_memory(model, data)
        computed = _run(model, data)
    for name, array in computed.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InvalidData(
                f"the teacher's '{name}' is NaN or infinite on some samples",
                "remove such samples, or repair the teacher",
            )
    if file is not None:
        write_checkpoint(file, _Kept(origin, computed))
    return computed


def _run(model: LoadedModel, data: Dataset) -> dict[str, Array]:
    """The numeric outputs; outputs of text are left out."""
    return {
        name: array.astype(np.float32) if DataType.from_numpy(array.dtype).is_float else array
        for name, array in answers(model, data).items()
        if not array.dtype.hasobject
    }


def _check_memory(model: LoadedModel, data: Dataset) -> None:
    """Raise ResourceExhausted if the outputs would not fit into memory."""
    rows = model.signature.smallest_batch
    bytes_per_row = sum(array.nbytes for array in model.forward(data.rows(0, rows)).values()) / rows
    # The parts, their concatenation and the tensors are in memory at the same time.
    needed, usable = 3 * bytes_per_row * data.count, usable_memory()
    if usable and needed > usable:
        raise ResourceExhausted(
            f"the teacher's outputs for {data.count} samples need {needed / (1 << 30):.1f} GiB, "
            f"but {usable / (1 << 30):.1f} GiB of memory are available",
            "give fewer samples, or name fewer tensors as hints",
        )
