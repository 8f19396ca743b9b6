"""Fuzzes pruning: of weights, which changes nothing else, and of channels, which equals zeros where the channels are read."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from penstock.artifact import Artifact
from penstock.errors import InvalidConfig, PenstockError
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions, prune
from penstock.offline.compress.pruning.structured.cut import Structure
from penstock.offline.compress.sharing.share import ShareOptions, share
from penstock.offline.optimize.model import load_model, to_artifact
from tests.fuzz.offline import ModelTarget, agree, check_compressed, data_of, optimized
from tests.prunable_networks import random_cut, without_what_they_lead_to
from tests.random_models import RandomModel


class PrunerTarget(ModelTarget):
    """See ``Target``."""

    def check(self, artifact: Artifact, model: RandomModel) -> None:
        start = optimized(artifact)
        structure = Structure(start)
        kept = random_cut(structure, 0)
        agree(without_what_they_lead_to(structure, kept), structure.cut(kept), model)
        shared = share(start, ShareOptions(conv_bits=2, fc_bits=2))
        check_compressed(artifact, shared, data_of(model, artifact))
        pruned = prune(start, PruneOptions(GlobalRule(0.5)))
        check_compressed(artifact, pruned, data_of(model, artifact))
        before, after = (
            onnx.load_model_from_string(data).graph for data in (to_artifact(load_model(start)).data, pruned.data)
        )
        assert before.node == after.node
        for one, other in zip(before.initializer, after.initializer, strict=True):
            old, new = numpy_helper.to_array(one), numpy_helper.to_array(other)
            assert one.name == other.name
            assert ((new == old) | (new == np.zeros((), new.dtype))).all()

    def refuses(self, error: PenstockError) -> bool:
        return super().refuses(error) or isinstance(error, InvalidConfig)
