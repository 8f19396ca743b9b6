from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lightgbm", reason="the extra penstock[lightgbm] is not installed")

import lightgbm

from benchmarks.zoo.lightgbm import MODELS
from conversions import assert_same, assert_zoo
from penstock.errors import InvalidArgument, InvalidModel, Unsupported
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.frameworks.lightgbm import CONVERTER

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 5))
Y = RNG.integers(0, 3, 200)


def trained(objective: str, **params: Any) -> lightgbm.Booster:
    options = {
        "objective": objective,
        "num_leaves": 7,
        "min_data_in_leaf": 5,
        "verbosity": -1,
        "num_threads": 1,
        **params,
    }
    return lightgbm.train(options, lightgbm.Dataset(X, Y if "multi" in objective else Y > 0), 5)


@pytest.mark.parametrize("name", MODELS)
def test_the_zoo_gives_the_same_answers(name: str, tmp_path: Path) -> None:
    assert_zoo(MODELS[name], tmp_path)


@pytest.mark.parametrize("objective", ["fair", "poisson", "tweedie", "cross_entropy", "cross_entropy_lambda"])
def test_every_objective_has_its_link_function(objective: str, tmp_path: Path) -> None:
    assert_same("lightgbm", trained(objective), tmp_path)


def test_one_class_against_the_others(tmp_path: Path) -> None:
    assert_same("lightgbm", trained("multiclassova", num_class=3), tmp_path)


def test_the_square_root_of_the_target_is_undone(tmp_path: Path) -> None:
    assert_same("lightgbm", trained("regression", reg_sqrt=True), tmp_path)


def test_categories_are_truncated_as_in_c(tmp_path: Path) -> None:
    values = np.array([-3, -0.5, 0.5, 2.7, 49, 50, 4000, np.nan], np.float32)
    features = np.concatenate([np.zeros((8, 4), np.float32), values[:, None]], axis=1)
    assert_same("lightgbm", MODELS["categories"].make(tmp_path), tmp_path, features=features)


@pytest.mark.parametrize("options", [{"zero_as_missing": True}, {"use_missing": False}, {}])
def test_numbers_that_count_as_zero(options: dict[str, bool], tmp_path: Path) -> None:
    values = [0, 1e-36, -1e-36, 1e-35, -1e-35, 2e-35, -2e-35, np.nan, 1]
    features = RNG.choice(np.array(values, np.float32), (300, 5))
    x = np.where(RNG.random(X.shape) < 0.4, 0, X)
    params = {"num_leaves": 7, "min_data_in_leaf": 5, "verbosity": -1, "num_threads": 1, **options}
    assert_same("lightgbm", lightgbm.train(params, lightgbm.Dataset(x, Y), 5), tmp_path, features=features)


def test_truncated_and_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.txt"
    for text in ("", "tree\n", "tree\nversion=v4\nnum_class=1\n", "hello"):
        file.write_text(text)
        with pytest.raises(InvalidModel, match="LightGBM"):
            CONVERTER.open(file, ConvertOptions())


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_a_file_that_ends_within_its_trees_does_not_end_the_process(share: float, tmp_path: Path) -> None:
    file = Path(str(MODELS["classes"].make(tmp_path)))
    text = file.read_bytes()
    start, end = text.index(b"Tree=0"), text.index(b"end of trees")
    file.write_bytes(text[: start + int(share * (end - start))])
    with pytest.raises(InvalidModel, match="is truncated"):
        CONVERTER.open(file, ConvertOptions())


def test_other_objects_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="dict is not a model of LightGBM"):
        CONVERTER.open({}, ConvertOptions())


def test_damaged_files_end_in_an_error(tmp_path: Path) -> None:
    """A damaged number is a model too, but LightGBM must neither hang nor end the process."""
    rng, refused = np.random.default_rng(0), 0
    file = Path(str(MODELS["classes"].make(tmp_path)))
    data = file.read_bytes()
    for _ in range(60):
        at = int(rng.integers(len(data)))
        file.write_bytes(data[:at] + rng.bytes(4) + data[at + int(rng.integers(9)) :])
        try:
            CONVERTER.open(file, ConvertOptions())
        except (InvalidModel, Unsupported):
            refused += 1
    assert refused > 20
