"""Open a bundle or a model in the calling process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.artifact import Artifact
from penstock.bundle.local import DeviceLimits
from penstock.bundle.pipeline import PipelineBundle, open_any
from penstock.engines.custom_ops import run_file
from penstock.runtime.model import load_bundle, load_file
from penstock.runtime.pipeline import Pipeline


def open(
    path: str | Path,
    *,
    threads: int = 0,
    max_memory: int = 0,
    power_saving: bool = False,
    allow_python: bool = False,
    ops: str | Path | None = None,
) -> Any:
    """Open a bundle with the engine of its tuned variant, or a model file or folder with the default engine of its format.

    The bundle of a pipeline gives a ``Pipeline``; any other source gives a ``Model``. For bundles, ``threads`` is the number of
    threads of each model, of all its calls together, and ``max_memory`` limits the estimated bytes of memory of all models. With
    ``power_saving``, idle threads sleep instead of spinning. Without ``allow_python``, pipelines with steps in Python are refused.
    ``ops`` is a Python file that registers the operators of the model that are in Python; it is run.

    Type checkers cannot know the kind of a bundle: ``Model.open`` and ``Pipeline.open`` have precise types.

    Raises NotFound, IntegrityError (changed bundle, or golden samples with other results), Unavailable (no variant runs on this
    machine), ResourceExhausted, PermissionDenied, InvalidModel, Unsupported.
    """
    if ops is not None:
        run_file(Path(ops))
    opened = open_any(path)
    limits = DeviceLimits(threads, max_memory, power_saving)
    if isinstance(opened, PipelineBundle):
        return Pipeline(opened, limits, allow_python)
    return load_file(opened, Path(path)) if isinstance(opened, Artifact) else load_bundle(opened, limits)
