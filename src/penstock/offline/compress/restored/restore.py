"""For each method that changes weights without training: two models that are equal if the method did only what it should."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import onnx

from penstock.artifact import Artifact
from penstock.offline.compress.restored.recomposed import recomposed
from penstock.offline.compress.restored.reweighted import unpruned, unshared
from penstock.offline.compress.restored.unrounded import unrounded
from penstock.offline.optimize.model import read_proto

_UNDONE: dict[str, Callable[[onnx.ModelProto, Artifact], onnx.ModelProto]] = {
    "quantize": unrounded,
    "quantize_weights": unrounded,
    "quantize_dynamic": unrounded,
    "halve_weights": unrounded,
    "prune": unpruned,
    "prune_n_m": partial(unpruned, by_magnitude=False),
    "share": unshared,
}
"""By provenance step: the changed model with the weights of the model that the step was given."""
RESTORED = frozenset({*_UNDONE, "factorize"})
"""The steps whose result is checked in this way."""


class Pair(NamedTuple):
    """Two models that must be equal up to the order of summation."""

    found: Artifact
    wanted: Artifact


def steps(original: Artifact, made: Artifact) -> Iterator[tuple[str, Artifact, Artifact]]:
    """The steps from ``made`` back to ``original``, latest first: the name, the result and the source of each. It ends where a source is
    not in memory.
    """
    while made.source is not None and made.digest != original.digest:
        yield made.provenance[-1].name, made, made.source
        made = made.source


def restored(step: str, made: Artifact, source: Artifact) -> Pair | None:
    """The models to compare after ``step``, one of ``RESTORED``. None if ``made`` is ``source``. Raises WrongResult for weights that the
    step cannot give.
    """
    if made.data == source.data:
        return None
    if step == "factorize":
        layers = {name: way for name, way in made.provenance[-1].facts["layers"].items() if way}
        return Pair(made, _artifact(recomposed(read_proto(made), source, layers)))
    return Pair(_artifact(_UNDONE[step](read_proto(made), source)), source)


def _artifact(proto: onnx.ModelProto) -> Artifact:
    return Artifact.from_bytes(bytes(proto.SerializeToString(deterministic=True)))
