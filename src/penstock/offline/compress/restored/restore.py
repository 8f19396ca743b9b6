"""For each method that changes weights without training: construct two models that are equal if the method is correct."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import onnx

from penstock.artifact import Artifact
from penstock.offline.compress.restored.recomposed import recomposed
from penstock.offline.compress.restored.reweighted import unpruned, unshared
from penstock.offline.compress.restored.uncorrected import uncorrected
from penstock.offline.compress.restored.unreconstructed import unreconstructed
from penstock.offline.compress.restored.unrounded import unrounded
from penstock.offline.compress.restored.unstored import unstored
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import load_model, read_proto, to_proto

_PLAIN: dict[str, Callable[[onnx.ModelProto, Artifact], onnx.ModelProto]] = {
    "quantize": unrounded,
    "quantize_weights": unrounded,
    "quantize_dynamic": unrounded,
    "quantize_recurrent": unrounded,
    "halve_weights": unrounded,
    "correct-biases": uncorrected,
    "reconstruct": unreconstructed,
}
"""By provenance step: a function that gives the changed model the numbers of the step's input model."""
_LAYERED: dict[str, Callable[[onnx.ModelProto, Artifact, dict[str, dict[str, Any]]], onnx.ModelProto]] = {
    "prune": unpruned,
    "prune_n_m": partial(unpruned, by_magnitude=False),
    "share": unshared,
    "store_weights": unstored,
}
"""The same for steps that have facts about each layer."""
RESTORED = frozenset({*_PLAIN, *_LAYERED, "factorize"})
"""The steps whose result can be checked by ``restored``."""


class Pair(NamedTuple):
    """Two models whose outputs may differ only by the order of summation."""

    found: Artifact
    wanted: Artifact


def steps(original: Artifact, made: Artifact) -> Iterator[tuple[str, Artifact, Artifact]]:
    """The name, result and source of each step that changed the model, from ``made`` back to ``original``. The list ends at a step
    whose source is not in memory.
    """
    while made.source is not None and made.digest != original.digest:
        if made.digest != made.source.digest:
            yield made.provenance[-1].name, made, made.source
        made = made.source


def restored(step: str, made: Artifact, source: Artifact) -> Pair:
    """The models to compare after ``step``, one of ``RESTORED``. Raises WrongResult if the step cannot produce these weights."""
    proto = read_proto(made)
    if step in _PLAIN:
        return Pair(_artifact(_PLAIN[step](proto, source)), source)
    layers = {name: facts for name, facts in made.provenance[-1].facts["layers"].items() if facts}
    if step == "factorize":
        return Pair(made, _artifact(recomposed(proto, source, layers)))
    found = _LAYERED[step](proto, source, layers)
    # These steps write the model that they read, with other weights.
    return Pair(source if found == to_proto(load_model(source)) else _artifact(found), source)


def _artifact(proto: onnx.ModelProto) -> Artifact:
    return artifact_of(proto)
