"""What is known of a model before anything of it is loaded: where it lies, and how it is to be served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.online.repository.config import ModelConfig

BY_HAND = "1"
"""The version of a target on the command line."""


class ModelSource(msgspec.Struct, frozen=True):
    """A model as its repository, or the command line, defines it at one moment."""

    name: str
    folder: Path
    """What files that the configuration names are relative to."""
    versions: Mapping[str, Path]
    """By number, as text, the version's folder, or the one file that it is. An ensemble's may be empty folders."""
    given: ModelConfig = ModelConfig()
    """Its configuration, as the user has written it."""
    fingerprints: Mapping[str, str] = {}
    """By version what changes whenever its files do; below the empty name, that of what all share but the configuration."""
    fingerprint: str = ""
    """Changes whenever any of the model's files does, in a repository or not."""
    written_in: str = ""
    """The file that ``given`` was read from, as errors name it; empty if it was none."""
    no_versions: str = ""
    """Folders that are called by numbers which no version can have, as errors name them."""

    @property
    def is_ensemble(self) -> bool:
        return self.given.ensemble_scheduling is not None

    @property
    def parts(self) -> list[str]:
        """The models that an ensemble asks, each once."""
        return list(dict.fromkeys(step.model_name for step in self.given.steps))
