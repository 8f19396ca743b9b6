"""``optimize``: the default passes over a model, each verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.artifact import Artifact
from penstock.offline.optimize.base import OptimizeReport, PassManager, PassRecord
from penstock.offline.optimize.passes import default_passes
from penstock.tensor import Array


def optimize(
    artifact: Artifact,
    samples: Sequence[Mapping[str, Array]] | None = None,
    on_pass: Callable[[PassRecord], None] | None = None,
) -> tuple[Artifact, OptimizeReport]:
    """An artifact that gives the same answers by fewer nodes, and the report of every pass.

    ``samples`` are real inputs on which the answers are compared too, besides generated ones; the first 8 are used. A pass
    that changed the answers is undone and says so in its record. The same bytes give the same bytes.
    Raises InvalidModel and Unsupported for models that cannot be read, InvalidArgument for samples that do not fit.
    """
    return PassManager(default_passes()).run(artifact, samples or (), on_pass)
