"""Run data through the float model and keep statistics of its tensors, in memory that does not grow with the data."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidArgument
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement, float_model, nothing_to_quantise
from penstock.offline.compress.ptq.ranges.histogram import Histogram, TensorStatistics
from penstock.offline.compress.taps import BATCH_SIZE, GROUP_BYTES, Progress, Taps, no_progress
from penstock.offline.model_store import remembered
from penstock.offline.sessions import signature_of
from penstock.samples.open import Data

_STATISTICS_BYTES = 65536
"""Approximate size of the statistics of one tensor."""


def collect(
    artifact: Artifact,
    data: Data | Dataset,
    tensors: Sequence[str] | None = None,
    batch_size: int = BATCH_SIZE,
    progress: Progress = no_progress,
    memory_bytes: int = GROUP_BYTES,
) -> dict[str, TensorStatistics]:
    """Collect statistics of ``tensors``, by default of all tensors that can need a range in an INT8 version of the model.

    ``data`` are samples of any kind (``samples/open.py``), of any sizes. Batches have at most ``batch_size`` samples, or the
    model's fixed batch size, and fewer if all tensors of a batch exceed ``memory_bytes``, so that one pass suffices. The batch size
    affects the histograms only if it affects the engine's results. Within a build, statistics of the same model on the same
    ``Dataset`` are collected once. Memory: one histogram per tensor, and up to ``memory_bytes`` (or the largest tensor of the smallest
    batch, if that is larger) for one batch.

    A tensor that is always empty has an empty histogram. ``ranges`` gives such a tensor no range, so its operators stay float.

    Raises the errors of ``Taps`` if the data do not fit the model or the memory, or if a tensor becomes NaN or infinite; Unsupported
    if the model has nothing to quantise; InvalidArgument if ``tensors`` names a tensor that is not FP32.
    """
    model = float_model(artifact)
    names = _checked(model, tensors)
    known: dict[str, TensorStatistics] = {}
    if isinstance(data, Dataset):
        key = artifact.digest, data.digest, batch_size
        known = remembered("statistics", key, dict, _STATISTICS_BYTES * len(model.nodes))
    fixed, unclippable = model.fixed_ranges(), model.unclippable()
    missing = [name for name in names if name not in known]
    if missing:
        found = {name: TensorStatistics(Histogram(), name not in unclippable, fixed.get(name)) for name in missing}
        signature = signature_of(artifact)
        computed = [name for name in missing if name not in fixed]
        taps = Taps(model.artifact(), data, batch_size=batch_size, memory_bytes=memory_bytes, signature=signature)
        for name, array in taps.in_one_pass(computed).run(computed, progress):
            found[name].histogram.update(array)
            del array  # frees the array before the next batch runs
        known |= found
    return {name: known[name] for name in names}


def _checked(model: FloatModel, tensors: Sequence[str] | None) -> list[str]:
    if tensors is None:
        names = model.activations(model.integer_nodes(QdqPlacement.WIDE))
        if not names:
            raise nothing_to_quantise()
        return names
    for name in tensors:
        if not model.is_float(name):
            raise InvalidArgument(f"'{name}' is not an FP32 tensor of the model", "take the names from the model")
    return list(tensors)
