"""The steps that train, all by distillation from the original; labels join in if the data has them. Needs the extra ``torch``."""

from __future__ import annotations

import msgspec

from penstock.artifact import Artifact
from penstock.offline.compress.low_rank.factorize import FactorizeOptions, factorize
from penstock.offline.compress.planner.moves import State, Workshop, int8_scheme
from penstock.offline.compress.pruning.iterative import IterativeOptions, prune_iteratively
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions
from penstock.offline.compress.pruning.structured_recovery import ShrinkOptions, shrink
from penstock.offline.compress.ptq.recipe import PtqRecipe, equalized, quantize_with
from penstock.offline.compress.sharing.centroid_tuning import CentroidOptions, tune_centroids
from penstock.offline.compress.sharing.share import ShareOptions, share
from penstock.offline.compress.training.distill import recover
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.qat import QatOptions, train_quantized
from penstock.offline.compress.training.trainable import TrainableModel

_SPARSITY = 0.97
_CONV_BITS = 3
"""More bits for a convolution's weights than for a matrix product's, as in the paper: they are fewer, and reused."""


def shrink_to(workshop: Workshop, state: State, speedup: float) -> Artifact:
    """Channels and heads cut until the model is ``speedup`` times as fast, trained after every cut."""
    contract = workshop.spending.allowance("structure")
    options = ShrinkOptions(
        speedup=speedup, contract=contract, fit=_fit(workshop), second_chance=1.0, threads=workshop.threads
    )
    return shrink(state.model, workshop.fitted, options, held_out=workshop.held)


def split_layers(workshop: Workshop, state: State) -> Artifact:
    """Products split into thinner ones, then trained."""
    thin = factorize(state.model, workshop.fitted, FactorizeOptions(max_error=0.1, threads=workshop.threads))
    model = TrainableModel(thin)
    report = recover(model, workshop.fitted, workshop.original, _fit(workshop))
    return model.to_artifact("recover", {"teacher": workshop.original.digest}, report.facts())


def prune_weights(workshop: Workshop, state: State) -> Artifact:
    """As many weights zero as the contract bears, retrained after each level."""
    options = IterativeOptions(
        goal=PruneOptions(GlobalRule(_SPARSITY)),
        contract=workshop.spending.allowance("sparsity"),
        retrain=_fit(workshop, rate=3e-3),
    )
    return prune_iteratively(state.model, workshop.fitted, options, held_out=workshop.held)


def share_weights(workshop: Workshop, state: State, bits: int) -> Artifact:
    """2 ** ``bits`` values for the weights of each matrix product, trained after sharing."""
    shared = share(state.model, ShareOptions(conv_bits=min(8, bits + _CONV_BITS), fc_bits=bits))
    return tune_centroids(shared, workshop.original, workshop.fitted, CentroidOptions(_fit(workshop, rate=1e-4)))


def train_int8(workshop: Workshop, state: State) -> Artifact:
    """The INT8 model trained, from where quantisation left it."""
    prepared = equalized(state.model, workshop.fitted)
    recipe = PtqRecipe(equalize=False, correct_biases=False)
    start = quantize_with(recipe, prepared, workshop.fitted, int8_scheme(workshop))
    fit = msgspec.structs.replace(
        QatOptions().fit, epochs=workshop.epochs, seed=workshop.seed, threads=workshop.threads
    )
    return train_quantized(start, prepared, workshop.fitted, QatOptions(fit), teacher=workshop.original)


def _fit(workshop: Workshop, rate: float = 1e-3) -> FitOptions:
    return FitOptions(
        epochs=workshop.epochs, learning_rate=rate, batch_size=32, seed=workshop.seed, threads=workshop.threads
    )
