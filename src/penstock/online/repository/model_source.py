"""The source of a model: its files and its configuration, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.online.repository.config import ModelConfig

TARGET_VERSION = "1"
"""The version of a target on the command line."""


class ModelSource(msgspec.Struct, frozen=True):
    """A snapshot of a model's definition in its repository or on the command line."""

    name: str
    folder: Path
    """The folder to which file names in the configuration are relative."""
    versions: Mapping[str, Path]
    """The folder of each version, or its only file. The keys are version numbers as text. An ensemble's folders may be empty."""
    given: ModelConfig = ModelConfig()
    """The configuration as the user wrote it."""
    fingerprints: Mapping[str, str] = {}
    """Fingerprints by version; the empty key is for the files that all versions share, without the configuration."""
    fingerprint: str = ""
    """The fingerprint of all the model's files."""
    written_in: str = ""
    """The file that ``given`` was read from, for error messages; empty if there is none."""
    no_versions: str = ""
    """Folders whose names are numbers but not valid versions, for error messages."""

    @property
    def is_ensemble(self) -> bool:
        return self.given.ensemble_scheduling is not None

    @property
    def parts(self) -> list[str]:
        """The models that an ensemble calls, each once."""
        return list(dict.fromkeys(step.model_name for step in self.given.steps))
