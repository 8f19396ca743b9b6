from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import InvalidConfig
from penstock.online.repository.config import ModelConfig, TensorConfig
from penstock.online.repository.loading.labels import read_labels


def config(**files: str) -> ModelConfig:
    """A model whose outputs have the label ``files``."""
    return ModelConfig("m", output=tuple(TensorConfig(name, label_filename=file) for name, file in files.items()))


def test_line_n_is_the_name_of_class_n(tmp_path: Path) -> None:
    (tmp_path / "digits.txt").write_text("zero\none\n\nthree\n")
    (tmp_path / "empty").touch()
    found = read_labels(config(y="digits.txt", z="", e="empty"), tmp_path)
    assert found == {"y": ["zero", "one", "", "three"], "e": []}


def test_what_cannot_be_read_names_the_model_and_the_file(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match="cannot read the labels of model 'm' from '.*gone': No such file"):
        read_labels(config(y="gone"), tmp_path)
    with pytest.raises(InvalidConfig, match="labels of model 'm' in '.*binary' are not UTF-8"):
        read_labels(config(y="binary"), tmp_path)
    with pytest.raises(InvalidConfig, match="cannot read the labels"):
        read_labels(config(y="."), tmp_path)
