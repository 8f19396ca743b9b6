"""A model before anything of it is loaded: its files and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.online.repository.config import ModelConfig

TARGET_VERSION = "1"
"""The version of a target on the command line."""


class ModelSource(msgspec.Struct, frozen=True):
    """A model as its repository, or the command line, defines it at one moment."""

    name: str
    folder: Path
    """Files that the configuration names are relative to it."""
    versions: Mapping[str, Path]
    """By number, as text: the version's folder, or its one file. The folders of an ensemble may be empty."""
    given: ModelConfig = ModelConfig()
    """The configuration as the user wrote it."""
    fingerprints: Mapping[str, str] = {}
    """By version; the empty name stands for the files that all versions share, without the configuration."""
    fingerprint: str = ""
    """The fingerprint of all the model's files."""
    written_in: str = ""
    """The file that ``given`` was read from, as errors name it; empty if there is none."""
    no_versions: str = ""
    """Folders with a number that is not a valid version, as errors name them."""

    @property
    def is_ensemble(self) -> bool:
        return self.given.ensemble_scheduling is not None

    @property
    def parts(self) -> list[str]:
        """The models that an ensemble calls, each once."""
        return list(dict.fromkeys(step.model_name for step in self.given.steps))
