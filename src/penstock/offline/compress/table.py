"""The table of compression methods for the command line, ``penstock.compress``, the planner and the documentation.

A method's module is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

import msgspec

Kind = Literal["structure", "sparsity", "precision", "sharing", "training", "analysis"]
"""The part of a model that a method changes. In a plan, this kind determines the allowed loss of accuracy."""
Target = Literal["latency", "size"]


class PlannedStep(msgspec.Struct, frozen=True):
    """One use of a method in a plan."""

    name: str
    options: dict[str, Any] = {}
    targets: tuple[Target, ...] = ("latency", "size")
    """Targets of a plan for which the step is tried."""
    cures: Literal["", "inaccurate"] = ""
    """Try this step only if an earlier step of its stage had this result. Empty: always."""


class MethodEntry(msgspec.Struct, frozen=True):
    """One method: its name, a line of help, and its steps in a plan."""

    name: str
    kind: Kind
    summary: str
    steps: tuple[PlannedStep, ...] = ()
    order: Literal["first", "descend"] = "first"
    """``first``: a plan tries the steps in order until it keeps a model. ``descend``: until it rejects a model."""

    def load(self) -> Any:
        """Import the subclass of ``Method``, e.g. ``PruneChannelsMethod`` from ``methods/prune_channels.py``."""
        module = importlib.import_module(f"penstock.offline.compress.methods.{self.name.replace('-', '_')}")
        return getattr(module, f"{self.name.replace('-', ' ').title().replace(' ', '')}Method")


def _shrink(speedup: float, *targets: Target) -> PlannedStep:
    options = {"speedup": speedup, "recover": True, "importance": "activation", "second_chance": 2.0}
    return PlannedStep(f"shrink-{speedup:g}x", options, targets)


def _share(name: str, error: float, loss: float) -> PlannedStep:
    """The bounds apply to one layer before training. ``error`` is relative; ``loss`` is a fraction of the allowed loss."""
    options = {"by_sensitivity": True, "layer_error": error, "layer_loss": loss, "most_rows": 512}
    options |= {"tune": True, "tune_optional": True}
    return PlannedStep(f"share-{name}", options, ("size",))


METHODS = {
    entry.name: entry
    for entry in (
        MethodEntry(
            "quantize",
            "precision",
            "Quantise to INT8, or store weights in fewer bits, without training.",
            (
                PlannedStep("int8", {"budget_s": 2.0, "choice_s": 15.0}),
                PlannedStep("int8-mixed", {"budget_s": 5.0, "mixed": True}),
            ),
        ),
        # Tried only if INT8 is too inaccurate: training does not change its speed.
        MethodEntry(
            "qat",
            "precision",
            "Quantise to INT8 with training (quantisation-aware training).",
            (PlannedStep("int8-qat", {"budget_s": 2.0}, cures="inaccurate"),),
        ),
        MethodEntry(
            "sensitivity",
            "analysis",
            "Rank groups of operators by the accuracy that INT8 costs and the time that it saves.",
        ),
        MethodEntry(
            "prune",
            "sparsity",
            "Set the smallest weights to zero, in one step or in several steps with retraining.",
            (PlannedStep("prune", {"sparsity": 0.98, "iterative": True, "second_chance": 2.0}, ("size",)),),
        ),
        MethodEntry(
            "prune-channels",
            "structure",
            "Remove whole channels and attention heads, which leaves a smaller dense model.",
            (_shrink(1.5, "latency", "size"), *(_shrink(speedup, "latency") for speedup in (2.0, 3.0, 5.0))),
            "descend",
        ),
        MethodEntry(
            "low-rank",
            "structure",
            "Split large layers into low-rank factors, within an error bound.",
            (PlannedStep("low-rank", {"max_error": 0.1, "recover": True, "learning_rate": 1e-3}, ("latency",)),),
        ),
        MethodEntry(
            "share",
            "sharing",
            "Cluster weights onto a few shared values, and write or read the coded model.",
            (_share("fine", 0.03, 0.1), _share("medium", 0.1, 0.3), _share("coarse", 0.2, 0.6)),
            "descend",
        ),
        MethodEntry("distill", "training", "Train a student model on the outputs of a teacher."),
    )
}
