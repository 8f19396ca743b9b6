"""Make inputs with a default value constant."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.offline.optimize.base import Pass
from penstock.offline.optimize.model import load_model, to_artifact


class ConstantInputs(Pass):
    """Remove each input that is also an initialiser from the inputs.

    Exporters for IR version 3 had to list all weights as inputs, and some still do. A caller may replace such weights, so no engine
    folds or quantises them.

    1. The result takes the default value of every removed input. It rejects calls that give another.
    """

    name = "constant_inputs"

    def applications(self, model: ir.Model, skipped: Collection[str] = ()) -> Iterator[str]:
        """Remove the inputs one by one. The site is the input's name."""
        graph = model.graph
        for value in [one for one in graph.inputs if one.name in graph.initializers and one.name not in skipped]:
            graph.inputs.remove(value)
            yield value.name or ""


def with_constant_inputs(artifact: Artifact) -> Artifact:
    """``artifact`` without inputs that have a default value. Raises the errors of ``load_model``."""
    model = load_model(artifact)
    return to_artifact(model) if ConstantInputs().call(model) else artifact
