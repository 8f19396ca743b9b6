"""Run data through the float model and keep statistics of its tensors, in memory that does not grow with the data.

The tensors are taken in groups: a copy of the model that has a group's tensors as its outputs runs over all batches, each
output goes into its histogram and is dropped. A group is as large as the memory budget allows for one batch, so a model of
many tensors costs several passes. ONNX Runtime runs without graph rewrites: ranges belong to the graph as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument, InvalidData, ResourceExhausted, Unsupported
from penstock.offline.compress.ptq.batches import Batches, Data
from penstock.offline.compress.ptq.histogram import Histogram, TensorStatistics
from penstock.offline.compress.ptq.placement import FloatModel, Placement
from penstock.resources import usable_memory
from penstock.tensor import Array, DataType, Signature

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps in total."""

_MEMORY_SHARE = 0.5
"""Share of the machine's memory that one batch of the largest tensor may take, with the tensor that it is made from."""
_NAMED = 5
"""Samples named in a message."""


def collect(
    artifact: Artifact,
    data: Data,
    tensors: Sequence[str] | None = None,
    batch_size: int = 32,
    threads: int = 1,
    progress: Progress | None = None,
    memory_bytes: int = 256 << 20,
) -> dict[str, TensorStatistics]:
    """Statistics of ``tensors``, by default of all that an integer version of the model may need a range for.

    ``data`` holds an array for each input by name, samples along the first axis, or is an iterable of such mappings, whose
    shapes may differ: see ``batches.py``. Batches have at most ``batch_size`` samples; a model with a fixed first axis of k
    gets k at a time. How the data are cut does not change the histograms beyond how the engine's own results depend on it.
    The state is one histogram a tensor; the outputs of one batch take up to ``memory_bytes``, or what the largest takes.

    A tensor that is always empty keeps an empty histogram, and one that never varies a constant one: ``ranges`` gives the
    first no range, so that its operators stay float, and the second one that holds its value and zero.

    Raises InvalidData if the data do not fit the model, are not a multiple of k samples, or make a tensor NaN or infinite
    (naming it, and the samples where its first axis counts them); ResourceExhausted if the largest tensor of one batch would take
    more than half of the memory; Unsupported if the model has nothing to quantise; InvalidArgument if ``tensors`` names one
    that is not FP32.
    """
    model = FloatModel(artifact)
    names = _checked(model, tensors)
    batches = Batches(signature_of(artifact), data, batch_size)
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

    for group in [from_inputs, *groups] if from_inputs else groups:
        loaded = None if group is from_inputs else _load(model, group, threads)
        first = 0
        for batch in batches:
            rows = len(next(iter(batch.values())))
            # No name for the outputs, which would keep them while the next batch runs.
            _update(found, loaded.forward(batch) if loaded else {n: batch[n] for n in group}, first, rows)
            first += rows
            step()
        if loaded:
            loaded.unload()
    return found


def signature_of(artifact: Artifact) -> Signature:
    """What goes into ``artifact`` and comes out. Raises InvalidModel if ONNX Runtime refuses it."""
    loaded = get_engine("onnxruntime").load(artifact, {"threads": 1, "graph_level": "disabled"})
    signature = loaded.signature
    loaded.unload()
    return signature


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


def _groups(model: FloatModel, names: list[str], batches: Batches, threads: int, memory_bytes: int) -> list[list[str]]:
    """``names`` in groups whose outputs for one batch fit ``memory_bytes``, judged by running a few samples of the largest batch."""
    if not names:
        return []
    loaded = _load(model, names, threads)
    outputs = loaded.forward({name: array[: batches.smallest] for name, array in batches.largest.items()})
    loaded.unload()
    rows = len(next(iter(batches.largest.values())))
    sizes = {name: outputs[name].nbytes * rows // batches.smallest for name in names}
    _check_memory(sizes, rows, batches.smallest)
    groups: list[list[str]] = [[]]
    used = 0
    for name in names:
        if groups[-1] and used + sizes[name] > memory_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += sizes[name]
    return groups


def _check_memory(sizes: Mapping[str, int], rows: int, smallest: int) -> None:
    """Refuse before the machine runs out: the largest tensor of a batch is there together with the one that it is made from."""
    largest = max(sizes, key=lambda name: sizes[name])
    needed, limit = 2 * sizes[largest], int(_MEMORY_SHARE * usable_memory())
    if limit and needed > limit:
        fitting = rows * limit // needed // smallest * smallest
        raise ResourceExhausted(
            f"tensor '{largest}' and its source take {needed / 2**20:.0f} MiB for a batch of {rows} sample(s), "
            f"of {limit / 2**20:.0f} MiB that calibration may use here",
            f"calibrate with batches of at most {fitting}"
            if fitting
            else "give smaller samples, or calibrate on a machine with more memory",
        )


def _load(model: FloatModel, outputs: Sequence[str], threads: int) -> LoadedModel:
    """The model with ``outputs`` in place of its own outputs; what they do not need is not run."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, DataType.FP32.onnx, None) for name in outputs)
    artifact = Artifact.from_bytes(proto.SerializeToString())
    return get_engine("onnxruntime").load(artifact, {"threads": threads, "graph_level": "disabled", "arena": False})


def _update(found: dict[str, TensorStatistics], arrays: Mapping[str, Array], first: int, rows: int) -> None:
    """Add what a batch of ``rows`` samples, from number ``first`` on, made of each tensor."""
    for name, array in arrays.items():
        try:
            found[name].histogram.update(array)
        except InvalidData as error:
            where = _bad_samples(array, first, rows)
            raise InvalidData(f"tensor '{name}' becomes NaN or infinite in {where}", error.hint) from None


def _bad_samples(array: Array, first: int, rows: int) -> str:
    if array.shape[:1] != (rows,):
        return f"samples {first} to {first + rows - 1}"
    bad = first + np.flatnonzero(~np.isfinite(array.reshape(rows, -1)).all(axis=1))
    more = f" and {bad.size - _NAMED} more" if bad.size > _NAMED else ""
    return f"sample(s) {', '.join(map(str, bad[:_NAMED].tolist()))}{more}"
