"""The FP32 version of a model. Methods that need FP32 weights start from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import PenstockError
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.fp32.dequantized import dequantized
from penstock.offline.compress.fp32.single import in_single
from penstock.offline.model_store import remembered
from penstock.offline.optimize.optimizer import optimize
from penstock.offline.sessions import signature_of
from penstock.tensor import Array

IN_FP32 = "fp32"
"""The name of the conversion, as a step of a candidate."""


def in_fp32(artifact: Artifact) -> Artifact:
    """``artifact`` without rounding, in FP32; ``artifact`` itself if it is in FP32. Computed once per build. Raises the errors of
    ``in_single``.
    """
    key = artifact.digest, artifact.path
    return remembered("fp32", key, lambda: in_single(dequantized(artifact)), 2 * artifact.size_bytes)


def optimized_in_fp32(artifact: Artifact, samples: Sequence[Mapping[str, Array]] = ()) -> Artifact:
    """``in_fp32``, optimised again if it changed ``artifact``. ``samples`` are those of ``optimize``."""
    found = in_fp32(artifact)
    return artifact if found is artifact else optimize(found, samples)[0]


def converted(artifact: Artifact, original: Artifact, data: Dataset) -> tuple[Artifact, tuple[str, ...]]:
    """``optimized_in_fp32`` of ``artifact``, an optimised version of ``original``. If the model cannot be converted, or if it would be
    wrong in FP32, returns ``artifact`` itself, with a note.
    """
    try:
        samples = [call.inputs for call in data.mix(signature_of(original).smallest_batch)]
        found = optimized_in_fp32(artifact, samples)
        if found is not artifact:
            check_explained(original, found, data)
    except PenstockError as error:
        return artifact, (f"the model was not converted to FP32: {error.message}",)
    return found, ()
