"""Loads a version that may be the bundle of a pipeline: its function, and each of its models as a version of its own.

All functions here block, so call them on a thread, not on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.loader import LoadedVersion, load_version
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.resolved_version import LoadOptions
from penstock.pipeline.function import Function


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
    """Load ``version`` of ``source``, a pipeline or a model. Raises as ``load_version`` does."""
    return load_version(layout, source, version, load_options)
