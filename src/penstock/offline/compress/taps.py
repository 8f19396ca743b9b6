"""The tensors inside a model while it runs over data: what equalisation, bias correction and factorisation look at.

Tensors come one batch at a time and are dropped again, so that statistics of any amount of data take little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument, InvalidData
from penstock.offline.dataset import Dataset, check_dataset
from penstock.offline.optimize.model import read_proto
from penstock.perf.measure import repeat_rows
from penstock.tensor import Array, DataType

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps in total."""


def no_progress(_done: int, _total: int) -> None:
    """Tell nobody."""


class Taps:
    """A model's FP32 tensors on data, by name, batch by batch, as the graph stands: the engine rewrites nothing.

    Raises InvalidData if the data do not fit the model's inputs.
    """

    def __init__(
        self,
        artifact: Artifact,
        data: Dataset,
        *,
        batch_size: int = 32,
        threads: int = 1,
        memory_bytes: int = 256 << 20,
    ) -> None:
        """``memory_bytes`` bounds what the tapped tensors of one batch take, or the largest of them alone."""
        if batch_size < 1:
            raise InvalidArgument(f"the batch size is {batch_size}", "give at least 1")
        self._proto = read_proto(artifact)
        self._threads = threads
        self._memory_bytes = memory_bytes
        loaded = self._load([value.name for value in self._proto.graph.output])
        signature = loaded.signature
        loaded.unload()
        self.data = check_dataset(data.inputs, signature)
        self.batch_size = batch_size if signature.batchable else signature.smallest_batch
        self.batchable = signature.batchable
        """Whether a call takes any number of samples, or exactly ``batch_size``."""
        self._smallest = signature.smallest_batch

    def run(self, names: Sequence[str], progress: Progress = no_progress) -> Iterator[tuple[str, Array]]:
        """Every tensor of ``names`` for every batch, in batches' order for each; the groups that fit in memory one by one.

        Raises InvalidData if one holds NaN or infinity.
        """
        groups = self._groups(list(dict.fromkeys(names)))
        starts = range(0, self.data.count, self.batch_size)
        for number, group in enumerate(groups):
            model = self._load(group)
            for done, start in enumerate(starts, 1):
                for name, array in model.forward(self.data.rows(start, start + self.batch_size)).items():
                    if not np.isfinite(array).all():
                        raise InvalidData(
                            f"tensor '{name}' becomes NaN or infinite on the data",
                            "clean the data, or repair the model",
                        )
                    yield name, array
                progress(number * len(starts) + done, len(groups) * len(starts))
            model.unload()

    def shapes(self, names: Sequence[str], rows: int) -> dict[str, tuple[int, ...]]:
        """The shapes of those tensors in a call of ``rows`` samples, or of as many as a call takes."""
        model = self._load(list(dict.fromkeys(names)))
        outputs = model.forward(repeat_rows(self.data.inputs, rows if self.batchable else self.batch_size))
        model.unload()
        return {name: array.shape for name, array in outputs.items()}

    def _groups(self, names: list[str]) -> list[list[str]]:
        if not names:
            return []
        model = self._load(names)
        sizes = {name: array.nbytes for name, array in model.forward(self.data.rows(0, self._smallest)).items()}
        model.unload()
        groups: list[list[str]] = [[]]
        used = 0
        for name in names:
            size = sizes[name] * self.batch_size // self._smallest
            if groups[-1] and used + size > self._memory_bytes:
                groups.append([])
                used = 0
            groups[-1].append(name)
            used += size
        return groups

    def _load(self, outputs: Sequence[str]) -> LoadedModel:
        """The model with ``outputs`` in place of its own; what they do not need is not run."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self._proto)
        own = {value.name: value for value in proto.graph.output}
        values = [
            own.get(name) or onnx.helper.make_tensor_value_info(name, DataType.FP32.onnx, None) for name in outputs
        ]
        del proto.graph.output[:]
        proto.graph.output.extend(values)
        options = {"threads": self._threads, "graph_level": "disabled", "arena": False}
        return get_engine("onnxruntime").load(Artifact.from_bytes(proto.SerializeToString()), options)
