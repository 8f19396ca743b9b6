"""Fuzzes low-rank factors: they are what the method says, and layers whose weights have rank 1 keep their outputs at rank 1."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, PenstockError
from penstock.offline.compress.low_rank.factorize import FactorizeOptions, factorize
from tests.fuzz.offline import ModelTarget, agree, check_compressed, data_of, optimized
from tests.random_models import RandomModel


class LowRankTarget(ModelTarget):
    """See ``Target``."""

    def check(self, artifact: Artifact, model: RandomModel) -> None:
        start, data = optimized(artifact), data_of(model, artifact)
        for aware in (False, True):
            made = factorize(start, data, FactorizeOptions(rank=1, min_ms=0, aware=aware))
            check_compressed(start, made, data)
        start = _with_rank_one(start)
        made = factorize(start, data, FactorizeOptions(rank=1, min_ms=0, aware=False))
        check_compressed(start, made, data)
        agree(start, made, model)

    def refuses(self, error: PenstockError) -> bool:
        return super().refuses(error) or isinstance(error, InvalidArgument)


def _with_rank_one(artifact: Artifact) -> Artifact:
    proto = onnx.load_model_from_string(artifact.data)
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.ndim == 2 and array.dtype == np.float32 and array.size:
            left, values, right = np.linalg.svd(array.astype(np.float64))
            one = (values[0] * np.outer(left[:, 0], right[0])).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(one, tensor.name))
    return Artifact.from_bytes(proto.SerializeToString())
