from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("skl2onnx", reason="the extra penstock[sklearn] is not installed")

from onnxruntime import InferenceSession
from skl2onnx._parse import sklearn_parsers_map
from skl2onnx._supported_operators import sklearn_operator_name_map
from skl2onnx.common._registration import _converter_pool
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import BaggingRegressor, GradientBoostingClassifier, RandomForestClassifier, VotingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    KBinsDiscretizer,
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    RobustScaler,
    StandardScaler,
)
from sklearn.tree import DecisionTreeRegressor

from benchmarks.zoo.sklearn import MODELS, rows
from conversions import assert_same, assert_zoo, run
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, InvalidModel, PermissionDenied, Unsupported
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.offline.convert.convert import convert
from penstock.offline.convert.frameworks.sklearn import CONVERTER
from penstock.offline.convert.parity.parity import certify
from penstock.tensor import DataType

X, Y = rows()


@pytest.mark.parametrize(
    "name",
    # The large forest differs from ``forest_joblib`` in its size only.
    [pytest.param(name, marks=pytest.mark.slow) if name == "forest_large" else name for name in MODELS],
)
def test_the_zoo_gives_the_same_answers(name: str, tmp_path: Path) -> None:
    if name == "pipeline_xgboost":
        pytest.importorskip("xgboost")
    assert_zoo(MODELS[name], tmp_path)


@pytest.mark.parametrize("scaler", [StandardScaler(), MinMaxScaler(), MaxAbsScaler(), RobustScaler()], ids=str)
def test_a_tree_behind_a_scaler_takes_the_same_branches(scaler: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 50, size=(500, 5)).astype(np.float32)
    model = make_pipeline(scaler, DecisionTreeRegressor(random_state=0)).fit(x, rng.normal(size=500))
    assert_same("sklearn", model, tmp_path, features=x)


@pytest.mark.parametrize(
    "model",
    [
        GradientBoostingClassifier(n_estimators=5, loss="exponential", random_state=0),
        BaggingRegressor(DecisionTreeRegressor(max_depth=4), n_estimators=3, random_state=0),
        VotingClassifier(
            [("a", LogisticRegression()), ("b", RandomForestClassifier(3, random_state=0))], voting="soft"
        ),
        make_pipeline("passthrough", LogisticRegression()),
    ],
    ids=str,
)
def test_more_estimators(model: Any, tmp_path: Path) -> None:
    assert_same("sklearn", model.fit(X, Y > 0), tmp_path)


@pytest.mark.filterwarnings("ignore:Feature 1 is constant")
@pytest.mark.parametrize("width", [np.float32, np.float64])
@pytest.mark.parametrize("encode", ["ordinal", "onehot", "onehot-dense"])
def test_bins_are_those_of_scikit_learn_also_at_their_edges(encode: str, width: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(100, 3))
    x[:, 1] = 3.0  # a single bin
    model = KBinsDiscretizer([4, 2, 5], encode=encode, strategy="quantile").fit(x)
    edges = np.stack([np.resize(one, 6) for one in model.bin_edges_], axis=1)
    edges[:, 1] = 3.0
    features = np.concatenate([np.nextafter(edges, -9), edges, np.nextafter(edges, 9)]).astype(width)
    features = np.concatenate([features, np.nextafter(features, width(-9)), np.nextafter(features, width(9))])
    source = CONVERTER.open(
        model, ConvertOptions(inputs=(InputSpec("x", DataType.from_numpy(np.dtype(width)), ("N", 3)),))
    )
    source.export(tmp_path / "model.onnx", 21)
    (found,) = run(onnx.load(tmp_path / "model.onnx"), {"x": features}).values()
    np.testing.assert_array_equal(found, source.forward({"x": features})["transformed"])
    assert found.dtype == width


@pytest.mark.parametrize("step", [OneHotEncoder(), KBinsDiscretizer(4, encode="onehot", strategy="uniform")], ids=str)
def test_the_rounding_of_a_linear_model_behind_whole_numbers_is_expected(step: Any) -> None:
    """The weights are attributes, whose rounding no noise on inputs of 0 and 1 shows."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 4, size=(200, 3)).astype(np.float32)
    for seed in range(5):
        model = make_pipeline(step, Ridge()).fit(x, rng.normal(size=200))
        done = convert(model, inputs="x:float32[N,3]", seed=seed)
        assert done.certificate is not None
        assert done.certificate.holds, done.certificate.text


def test_an_imputer_with_an_indicator_is_diagnosed() -> None:
    x, y = rows(missing=True)
    model = make_pipeline(SimpleImputer(add_indicator=True), LogisticRegression()).fit(x, y)
    with pytest.raises(Unsupported, match="add_indicator"):
        CONVERTER.open(model, ConvertOptions())


def test_a_pickle_needs_permission(tmp_path: Path) -> None:
    file = tmp_path / "model.pkl"
    file.write_bytes(pickle.dumps(LogisticRegression().fit(X, Y)))
    with pytest.raises(
        PermissionDenied, match=r"'model\.pkl' is not a skops file, and loading it as a pickle can run code"
    ) as raised:
        CONVERTER.open(file, ConvertOptions())
    assert "--trust-pickle" in raised.value.hint
    CONVERTER.open(file, ConvertOptions(trust_pickle=True))


class Attack:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (eval, ("1",))


def test_a_trusted_pickle_still_may_not_run_any_function(tmp_path: Path) -> None:
    file = tmp_path / "model.pkl"
    file.write_bytes(pickle.dumps([LogisticRegression(), Attack()]))
    with pytest.raises(PermissionDenied, match="eval"):
        CONVERTER.open(file, ConvertOptions(trust_pickle=True))


def test_truncated_skops_files_are_refused(tmp_path: Path) -> None:
    file = Path(str(MODELS["logistic"].make(tmp_path)))
    data = file.read_bytes()
    for size in (4, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(InvalidModel, match="not a skops file"):
            CONVERTER.open(file, ConvertOptions())


def test_unfitted_and_foreign_objects_are_refused() -> None:
    with pytest.raises(InvalidModel, match="not fitted"):
        CONVERTER.open(LogisticRegression(), ConvertOptions())
    with pytest.raises(InvalidArgument, match="dict is not an estimator"):
        CONVERTER.open({}, ConvertOptions())
    with pytest.raises(InvalidArgument, match="type is not an estimator"):
        CONVERTER.open(LogisticRegression, ConvertOptions())


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (InputSpec("x", DataType.FP32, ("N", 4)), r"shape \['N', 4\]"),
        (InputSpec("x", DataType.BYTES, ("N", 5)), "type BYTES"),
    ],
)
def test_wrong_inputs_are_refused_with_the_right_declaration(declared: InputSpec, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as raised:
        CONVERTER.open(LogisticRegression().fit(X, Y), ConvertOptions(inputs=(declared,)))
    assert '--inputs "x:float32[N,5]"' in raised.value.hint


def test_an_estimator_that_takes_only_doubles() -> None:
    source = CONVERTER.open(KMeans(3, n_init=1, random_state=0).fit(X.astype(np.float64)), ConvertOptions())
    (name,) = source.signature.input_names
    assert source.forward({name: X})["label"].shape == (len(X),)


@pytest.mark.parametrize("loss", ["log_loss", "modified_huber"])
@pytest.mark.parametrize("classes", [2, 3])
def test_labels_do_not_depend_on_saturated_probabilities(loss: str, classes: int) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(60, 4)) * 500).astype(np.float32)
    model = SGDClassifier(loss=loss, random_state=0).fit(x, np.array(list("abc"))[rng.integers(0, classes, 60)])
    found = convert(model)
    assert found.certificate is not None
    outputs = run(onnx.load_model_from_string(found.artifact.data), {"features": x})
    assert [one.decode() for one in outputs["label"]] == model.predict(x).tolist()
    np.testing.assert_allclose(outputs["probabilities"], model.predict_proba(x), rtol=1e-5, atol=1e-30)


def test_a_conversion_leaves_no_registration_with_skl2onnx() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    before = dict(sklearn_operator_name_map), dict(sklearn_parsers_map), dict(_converter_pool)
    model = make_pipeline(StandardScaler(), lightgbm.LGBMRegressor(n_estimators=2, verbose=-1)).fit(X, X[:, 0])
    assert convert(model).certificate is not None
    assert before == (sklearn_operator_name_map, sklearn_parsers_map, _converter_pool)


def test_a_classifier_of_several_outputs_is_diagnosed() -> None:
    x = np.random.default_rng(0).normal(size=(60, 3))
    model = KNeighborsClassifier().fit(x, np.stack([x[:, 0] > 0, x[:, 1] > 1], axis=1).astype(int))
    with pytest.raises(Unsupported, match="KNeighborsClassifier with more than one output"):
        CONVERTER.open(model, ConvertOptions())


def test_an_imputer_of_missing_texts_warns_and_one_of_a_text_is_converted(tmp_path: Path) -> None:
    rows, classes = np.array([["a"], ["b"], ["a"], ["?"]] * 9, np.object_), np.arange(36) % 2
    missing = rows.copy()
    missing[rows == "?"] = None
    warned = []
    for value, x in (("?", rows), (None, missing)):
        imputer = SimpleImputer(missing_values=value, strategy="most_frequent")
        model = make_pipeline(imputer, OneHotEncoder(handle_unknown="ignore"), LogisticRegression()).fit(x, classes)
        source = CONVERTER.open(model, ConvertOptions())
        exported = source.export(tmp_path / "model.onnx", 21)
        artifact = Artifact.from_file(tmp_path / "model.onnx")
        assert certify(artifact, source, exported, ConvertOptions()).holds
        warned.append([text for text in exported.warnings if "replaces missing texts" in text and "'a'" in text])
        if value:
            (found,) = [np.asarray(one) for one in InferenceSession(artifact.data).run(None, texts(source, rows))[1:]]
            assert np.allclose(found, model.predict_proba(rows), atol=1e-6)
    assert [len(one) for one in warned] == [0, 1]


def texts(source: Any, rows: Any) -> dict[str, Any]:
    (spec,) = source.signature.inputs
    return {spec.name: rows}


def test_a_wrong_scale_before_trees_is_found_although_no_branch_changes(tmp_path: Path) -> None:
    columns = ColumnTransformer([("numbers", make_pipeline(StandardScaler()), [0, 1]), ("others", "drop", [2])])
    model = make_pipeline(columns, DecisionTreeRegressor(max_depth=2, random_state=0)).fit(X[:, :3], Y)
    opened = CONVERTER.open(model, ConvertOptions())
    exported = opened.export(tmp_path / "model.onnx", 21)
    proto = onnx.load(tmp_path / "model.onnx")
    assert certify(Artifact.from_bytes(proto.SerializeToString()), opened, exported, ConvertOptions()).holds
    (scale,) = {node.input[1] for node in proto.graph.node if node.op_type == "Div"}
    (weight,) = (tensor for tensor in proto.graph.initializer if tensor.name == scale)
    changed = onnx.numpy_helper.to_array(weight) * np.float32(1.001)
    weight.CopyFrom(onnx.numpy_helper.from_array(changed, scale))
    found = certify(Artifact.from_bytes(proto.SerializeToString()), opened, exported, ConvertOptions())
    assert found.first_divergent is not None
    assert found.first_divergent.source == "columntransformer/numbers/standardscaler"
