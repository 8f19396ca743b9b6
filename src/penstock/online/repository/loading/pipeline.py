"""Loads a version that may be the bundle of a pipeline: its function, and each of its models as a version of its own.

All functions here block, so call them on a thread, not on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.bundle.manifest import PipelineManifest
from penstock.bundle.open import is_bundle, peek
from penstock.bundle.pipeline import PipelineBundle, open_pipeline
from penstock.engines.base import LoadedModel, RequestModel
from penstock.engines.registry import is_available
from penstock.errors import PenstockError, Unsupported
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.loader import LoadedVersion, load, load_version, refuse_changes
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.resolved_version import LoadOptions, find
from penstock.online.repository.triton.rules import prefix
from penstock.pipeline.function import Function
from penstock.pipeline.golden import replayed
from penstock.pipeline.streaming.models import LocalModel
from penstock.pipeline.streaming.stages import Stages
from penstock.resources import machine_facts


class LoadedPipeline(msgspec.Struct, frozen=True, eq=False):
    """A pipeline in memory. Its models are warmed up."""

    source: ModelSource
    version: str
    function: Function
    parts: Mapping[str, LoadedVersion]
    """The models by name."""
    identity: str
    """Identifies the content."""
    load_s: float = 0.0

    def drop(self) -> None:
        """Unload the models. Blocks."""
        for part in self.parts.values():
            part.drop()


def load_any(
    layout: Layout, source: ModelSource, version: str, load_options: LoadOptions
) -> LoadedVersion | LoadedPipeline:
    """Load ``version`` of ``source``, a pipeline or a model.

    Raises the errors of ``load_version``. For a pipeline, also raises IntegrityError if its golden samples give other results than
    recorded, and PermissionDenied if it runs Python code without ``load_options.allow_python``.
    """
    path = _bundle_in(source.versions[version])
    if path is None or not isinstance(peek(path), PipelineManifest):
        return load_version(layout, source, version, load_options)
    refuse_changes(layout, source)
    try:
        loaded = _load_pipeline(path, source, version, load_options)
    except PenstockError as error:
        refuse_changes(layout, source)
        error.message = prefix(source.name) + error.message.removeprefix(prefix(source.name))
        raise
    try:
        refuse_changes(layout, source)
    except PenstockError:
        loaded.drop()
        raise
    return loaded


def _bundle_in(path: Path) -> Path | None:
    """The bundle of a version: ``path`` itself, or the only bundle in this folder; None if there is none."""
    if is_bundle(path):
        return path
    found = [one for one in path.glob("*.bundle") if is_bundle(one)] if path.is_dir() else []
    return found[0] if len(found) == 1 else None


def _load_pipeline(path: Path, source: ModelSource, version: str, load_options: LoadOptions) -> LoadedPipeline:
    started = time.monotonic()
    opened = open_pipeline(path)
    opened.check_python(load_options.allow_python)
    function = opened.function(load_options.allow_python)
    parts: dict[str, LoadedVersion] = {}
    try:
        for name, bundle in opened.models.items():
            part = ModelSource(f"{source.name}/{name}", source.folder, {version: bundle.path})
            parts[name] = load(find(part, version, load_options, bundle))
        _replay(opened, function, parts)
    except BaseException:
        for loaded in parts.values():
            loaded.drop()
        raise
    return LoadedPipeline(source, version, function, parts, opened.digest, time.monotonic() - started)


def _replay(opened: PipelineBundle, function: Function, parts: Mapping[str, LoadedVersion]) -> None:
    """Run the golden samples with the loaded models. Raises IntegrityError."""
    if not opened.golden.examples:
        return
    models = {name: LocalModel(_only(part).forward) for name, part in parts.items()}
    machine = machine_facts()
    variants = {name: bundle.choose(machine, is_available).name for name, bundle in opened.models.items()}
    for one in replayed(function):
        opened.replay(Stages(one, models), variants)


def _only(part: LoadedVersion) -> LoadedModel:
    model = part.models[0]
    if isinstance(model, RequestModel):
        raise Unsupported("a pipeline cannot contain a Python model", "use a Python step")
    return model
