"""Run data through the float model and keep statistics of its tensors, in memory that does not grow with the data.

The tensors are taken in groups: a copy of the model that has a group's tensors as its outputs runs over all batches, each
output goes into its histogram and is dropped. A group is as large as the memory budget allows for one batch, so a model of
many tensors costs several passes. ONNX Runtime runs without graph rewrites: ranges belong to the graph as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx

from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument, InvalidData, Unsupported
from penstock.offline.compress.ptq.histogram import Histogram, TensorStatistics
from penstock.offline.compress.ptq.placement import FloatModel, Placement
from penstock.offline.dataset import check_dataset
from penstock.tensor import Array, DataType, Signature

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps in total."""


def collect(
    artifact: Artifact,
    data: Mapping[str, Array],
    tensors: Sequence[str] | None = None,
    batch_size: int = 32,
    threads: int = 1,
    progress: Progress | None = None,
    memory_bytes: int = 256 << 20,
) -> dict[str, TensorStatistics]:
    """Statistics of ``tensors``, by default of all that an integer version of the model may need a range for.

    ``data`` holds an array for each input by name, samples along the first axis; arrays of other names are left out. Batches
    have ``batch_size`` samples and the last one what is left; a model with a fixed first axis of k gets k at a time.
    The state is one histogram a tensor; the outputs of one batch take up to ``memory_bytes``, or what the largest takes.

    Raises InvalidData if the data do not fit the model, are not a multiple of k samples, or make a tensor NaN or infinite;
    Unsupported if the model has nothing to quantise; InvalidArgument if ``tensors`` names one that is not FP32.
    """
    model = FloatModel(artifact)
    names = _checked(model, tensors)
    batches = _Batches(model, artifact, data, batch_size)
    fixed, unclippable = model.fixed_ranges(), model.unclippable()
    found = {name: TensorStatistics(Histogram(), name not in unclippable, fixed.get(name)) for name in names}
    from_inputs = [name for name in names if name in model.input_names and name not in fixed]
    computed = [name for name in names if name not in model.input_names and name not in fixed]
    groups = _groups(model, computed, batches, threads, memory_bytes)
    steps, total = 0, batches.count * (len(groups) + bool(from_inputs))

    def step() -> None:
        nonlocal steps
        steps += 1
        if progress is not None:
            progress(steps, total)

    if from_inputs:
        for batch in batches:
            _update(found, {name: batch[name] for name in from_inputs})
            step()
    for group in groups:
        loaded = _load(model, group, threads)
        for batch in batches:
            _update(found, loaded.forward(batch))
            step()
        loaded.unload()
    return found


class _Batches:
    """The data in batches, as often as asked for; the arrays are views."""

    def __init__(self, model: FloatModel, artifact: Artifact, data: Mapping[str, Array], batch_size: int) -> None:
        if batch_size < 1:
            raise InvalidArgument(f"the batch size is {batch_size}", "give at least 1")
        loaded = get_engine("onnxruntime").load(artifact, {"threads": 1, "graph_level": "disabled"})
        signature: Signature = loaded.signature
        loaded.unload()
        self._dataset = check_dataset({name: data[name] for name in signature.input_names if name in data}, signature)
        fixed = {spec.shape[0] for spec in signature.inputs if spec.shape[0] > 0}
        if len(fixed) > 1:
            raise Unsupported(f"the inputs' first axes are fixed to different sizes: {sorted(fixed)}")
        self.smallest = max(fixed, default=1)
        self.size = max(fixed, default=batch_size)
        self.count = -(-self._dataset.count // self.size)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for start in range(0, self._dataset.count, self.size):
            yield self._dataset.rows(start, start + self.size)

    @property
    def probe(self) -> dict[str, Array]:
        """The smallest input that the model takes."""
        return self._dataset.rows(0, self.smallest)


def _checked(model: FloatModel, tensors: Sequence[str] | None) -> list[str]:
    if tensors is None:
        names = model.activations(model.integer_nodes(Placement.WIDE))
        if not names:
            raise Unsupported(
                "the model has no operator to quantise", "INT8 needs Conv, Gemm or MatMul with constant FP32 weights"
            )
        return names
    for name in tensors:
        if not model.is_float(name):
            raise InvalidArgument(f"'{name}' is not an FP32 tensor of the model", "take the names from the model")
    return list(tensors)


def _groups(model: FloatModel, names: list[str], batches: _Batches, threads: int, memory_bytes: int) -> list[list[str]]:
    """``names`` in groups whose outputs for one batch fit ``memory_bytes``, judged by running the smallest input once."""
    if not names:
        return []
    loaded = _load(model, names, threads)
    outputs = loaded.forward(batches.probe)
    loaded.unload()
    groups: list[list[str]] = [[]]
    used = 0
    for name in names:
        size = outputs[name].nbytes * batches.size // batches.smallest
        if groups[-1] and used + size > memory_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _load(model: FloatModel, outputs: Sequence[str], threads: int) -> LoadedModel:
    """The model with ``outputs`` in place of its own outputs; what they do not need is not run."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, DataType.FP32.onnx, None) for name in outputs)
    artifact = Artifact.from_bytes(proto.SerializeToString())
    return get_engine("onnxruntime").load(artifact, {"threads": threads, "graph_level": "disabled", "arena": False})


def _update(found: dict[str, TensorStatistics], arrays: Mapping[str, Array]) -> None:
    for name, array in arrays.items():
        try:
            found[name].histogram.update(array)
        except InvalidData as error:
            raise InvalidData(f"tensor '{name}': {error.message}", error.hint) from None
