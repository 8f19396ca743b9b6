"""Reads the label files (names of classes) of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.errors import InvalidConfig
from penstock.online.repository.config import ModelConfig

_MAX_BYTES = 64 << 20


def read_labels(config: ModelConfig, folder: Path) -> Mapping[str, Sequence[str]]:
    """The class names of each output with a ``label_filename`` in ``folder``. Line n is the name of class n, counted from 0.

    Raises InvalidConfig.
    """
    return {
        output.name: _read(folder / output.label_filename, config.name)
        for output in config.output
        if output.label_filename
    }


def _read(path: Path, model: str) -> Sequence[str]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise InvalidConfig(f"the labels of model '{model}' in '{path}' take more than {_MAX_BYTES} bytes")
        return data.decode().splitlines()
    except OSError as error:
        raise InvalidConfig(f"cannot read the labels of model '{model}' from '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfig(f"the labels of model '{model}' in '{path}' are not UTF-8") from None
