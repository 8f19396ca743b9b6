"""Faults in the trees of real models: parity certifies none of them, however many trees there are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("skl2onnx", reason="the extra penstock[sklearn] is not installed")
pytest.importorskip("lightgbm", reason="the extra penstock[lightgbm] is not installed")
pytest.importorskip("xgboost", reason="the extra penstock[xgboost] is not installed")

import lightgbm
import xgboost
from sklearn.ensemble import ExtraTreesRegressor, GradientBoostingClassifier, RandomForestClassifier

from penstock.artifact import Artifact
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.parity.parity import certify

RNG = np.random.default_rng(7)
X = RNG.normal(size=(400, 6)).astype(np.float32) * np.array([1, 10, 100, 0.1, 1, 5], np.float32)
SCORE = X[:, 0] + np.sin(X[:, 1]) + (X[:, 3] > 0) * X[:, 4]
CLASSES = np.digitize(SCORE, [-1, 1])
MODELS: dict[str, Callable[[int], Any]] = {
    "sklearn forest": lambda trees: RandomForestClassifier(trees, max_depth=6, random_state=0).fit(X, CLASSES),
    "sklearn extra": lambda trees: ExtraTreesRegressor(trees, max_depth=6, random_state=0).fit(X, SCORE),
    "sklearn boosted": lambda trees: GradientBoostingClassifier(n_estimators=trees, random_state=0).fit(X, SCORE > 0),
    "xgboost": lambda trees: xgboost.XGBRegressor(n_estimators=trees, max_depth=4, n_jobs=1).fit(X, SCORE),
    "lightgbm": lambda trees: lightgbm.LGBMClassifier(n_estimators=trees, n_jobs=1, verbose=-1).fit(X, CLASSES),
}
MODES = {b"BRANCH_LEQ": b"BRANCH_LT", b"BRANCH_LT": b"BRANCH_LEQ"}


def attribute(model: onnx.ModelProto, name: str) -> Any:
    (node,) = [node for node in model.graph.node if node.op_type == "TreeEnsembleRegressor"]
    return next(one for one in node.attribute if one.name == name)


def threshold(model: onnx.ModelProto, at: int, rng: np.random.Generator) -> None:
    values = attribute(model, "nodes_values").floats
    values[at] += 0.01 * (abs(values[at]) + 0.1)


def next_threshold(model: onnx.ModelProto, at: int, rng: np.random.Generator) -> None:
    values = attribute(model, "nodes_values").floats
    values[at] = np.nextafter(np.float32(values[at]), np.float32(rng.choice([-np.inf, np.inf])))


def mode(model: onnx.ModelProto, at: int, rng: np.random.Generator) -> None:
    modes = attribute(model, "nodes_modes").strings
    modes[at] = MODES[modes[at]]


def missing(model: onnx.ModelProto, at: int, rng: np.random.Generator) -> None:
    attribute(model, "nodes_missing_value_tracks_true").ints[at] ^= 1


def feature(model: onnx.ModelProto, at: int, rng: np.random.Generator) -> None:
    ids = attribute(model, "nodes_featureids").ints
    ids[at] = (ids[at] + 1) % X.shape[1]


def leaf(model: onnx.ModelProto, at: int, rng: np.random.Generator) -> None:
    weights = attribute(model, "target_weights").floats
    weights[rng.choice(np.flatnonzero(weights))] *= 1.01


FAULTS = (threshold, next_threshold, mode, missing, feature, leaf)


def faulty(original: onnx.ModelProto, fault: Any, rng: np.random.Generator) -> onnx.ModelProto:
    model = onnx.ModelProto.FromString(original.SerializeToString())
    inner = [at for at, kind in enumerate(attribute(model, "nodes_modes").strings) if kind != b"LEAF"]
    fault(model, int(rng.choice(inner)), rng)
    return model


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trees", [1, 10, 100, 500])
@pytest.mark.parametrize("name", MODELS)
def test_no_fault_of_a_tree_is_certified(name: str, trees: int, tmp_path: Path) -> None:
    estimator, rng = MODELS[name](trees), np.random.default_rng(trees)
    source = importlib.import_module(f"penstock.offline.convert.frameworks.{name.split(maxsplit=1)[0]}").CONVERTER.open(
        estimator, ConvertOptions()
    )
    exported = source.export(tmp_path / "model.onnx", 21)
    original = onnx.load(tmp_path / "model.onnx")
    certificate = certify(Artifact.from_bytes(original.SerializeToString()), source, exported, ConvertOptions())
    assert certificate.holds
    assert certificate.trees >= trees
    for fault in FAULTS:
        artifact = Artifact.from_bytes(faulty(original, fault, rng).SerializeToString())
        certificate = certify(artifact, source, exported, ConvertOptions())
        assert not certificate.holds, fault.__name__
        assert certificate.first_divergent is not None
        assert certificate.first_divergent.source.startswith("tree ")
