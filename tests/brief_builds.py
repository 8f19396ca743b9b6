"""Builds that time candidates briefly, and that are never late, however busy the machine is."""

from __future__ import annotations

from pathlib import Path

from penstock.artifact import Artifact
from penstock.clock import ManualClock
from penstock.offline import build as offline
from penstock.offline.build import BuildResult, OnProgress, Recipe
from penstock.offline.deadline import BuildDeadline
from penstock.samples.open import Data


def brief() -> BuildDeadline:
    """A deadline that is always a second away. Half of the time that is left goes to the last comparison of candidates."""
    return BuildDeadline(1.0, ManualClock())


def build(
    model: str | Path | Artifact,
    output: Path,
    calibrate: Data | None = None,
    evaluate: Data | None = None,
    recipe: Recipe = Recipe(),  # noqa: B008 - immutable
    on_progress: OnProgress = lambda *_: None,
) -> BuildResult:
    """As ``penstock.build``."""
    return offline.build(model, output, calibrate, evaluate, recipe, on_progress, brief())
