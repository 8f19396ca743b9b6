"""The source of a model: its files and its configuration, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.online.repository.config import ModelConfig

TARGET_VERSION = "1"
"""The version number of a model that was passed on the command line."""


class ModelSource(msgspec.Struct, frozen=True):
    """A snapshot of a model's definition in its repository or on the command line."""

    name: str
    folder: Path
    """The folder to which relative file names in the configuration refer."""
    versions: Mapping[str, Path]
    """The folder or single file of each version, by version number as text. The folders of an ensemble may be empty."""
    given: ModelConfig = ModelConfig()
    """The configuration as the user wrote it."""
    fingerprints: Mapping[str, str] = {}
    """Fingerprints by version. An empty key stands for the files that all versions share, except the configuration."""
    fingerprint: str = ""
    """The fingerprint of all the model's files."""
    written_in: str = ""
    """The file from which ``given`` was read, for error messages; empty if there is no such file."""
    no_versions: str = ""
    """Folders whose names are numbers but not valid versions, for error messages."""

    @property
    def is_ensemble(self) -> bool:
        return self.given.ensemble_scheduling is not None

    @property
    def parts(self) -> list[str]:
        """The names of the models that an ensemble calls, without repetitions."""
        return list(dict.fromkeys(step.model_name for step in self.given.steps))
