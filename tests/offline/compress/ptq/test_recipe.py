from __future__ import annotations

import msgspec
import numpy as np
import pytest

import models
import networks
import outliers
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import Unsupported
from penstock.offline.compress.method import StepContext
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import PtqRecipe, check_float, equalized, placed, prepared, quantize_with
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.judge.accuracy import answers
from penstock.offline.judge.metrics import output_errors
from penstock.tensor import DataType

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, False, "")

ROWS = make_dataset({"x": np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)}, None)


@pytest.fixture(scope="module")
def cnn() -> Artifact:
    return networks.cnn(16)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return make_dataset({"x": networks.images(32)}, None)


def error(model: Artifact, other: Artifact, data: Dataset) -> float:
    one, two = (answers(get_engine("onnxruntime").load(each, {"threads": 1}), data) for each in (model, other))
    return max(output_errors(one, two).values())


def steps(model: Artifact) -> list[str]:
    return [step.name for step in model.provenance]


def test_the_careful_way_is_closer_than_the_plain_one(cnn: Artifact, data: Dataset) -> None:
    stages: list[tuple[int, int]] = []
    careful = quantize_with(PtqRecipe(), cnn, data, SCHEME, lambda done, total: stages.append((done, total)))
    plain = quantize_with(PtqRecipe(RangeMethod.MIN_MAX, equalize=False, correct_biases=False), cnn, data, SCHEME)
    assert error(cnn, careful, data) < error(cnn, plain, data) < 0.2
    assert stages == [(done, 6) for done in range(7)]
    assert careful.size_bytes < cnn.size_bytes


def test_it_is_deterministic(cnn: Artifact, data: Dataset) -> None:
    recipe = PtqRecipe(placement=QdqPlacement.WIDE)
    assert quantize_with(recipe, cnn, data, SCHEME).digest == quantize_with(recipe, cnn, data, SCHEME).digest


def test_what_is_switched_off_is_not_done(cnn: Artifact, data: Dataset) -> None:
    plain = PtqRecipe(RangeMethod.MSE, equalize=False, reconstruct=False, correct_biases=False)
    for changed, wanted in (
        ({}, ["quantize"]),
        ({"reconstruct": True}, ["quantize", "reconstruct"]),
        ({"correct_biases": True}, ["quantize", "correct-biases"]),
        ({"reconstruct": True, "correct_biases": True}, ["quantize", "reconstruct", "correct-biases"]),
    ):
        assert steps(quantize_with(msgspec.structs.replace(plain, **changed), cnn, data, SCHEME)) == wanted


def test_reconstructed_weights_lower_the_error_on_fresh_samples() -> None:
    model, rng = networks.mlp(), np.random.default_rng(1)
    few, fresh = (make_dataset({"x": rng.standard_normal((n, 16)).astype(np.float32)}, None) for n in (256, 500))
    seven_bits = msgspec.structs.replace(SCHEME, reduce_range=True)
    ways = (PtqRecipe(RangeMethod.MIN_MAX, reconstruct=each) for each in (False, True))
    without, better = (error(model, quantize_with(way, model, few, seven_bits), fresh) for way in ways)
    assert better < 0.95 * without


def test_one_sample_corrects_no_biases(cnn: Artifact) -> None:
    one = make_dataset({"x": networks.images(1)}, None)
    recipe = PtqRecipe(RangeMethod.MIN_MAX, equalize=False)
    without = PtqRecipe(RangeMethod.MIN_MAX, equalize=False, correct_biases=False)
    assert quantize_with(recipe, cnn, one, SCHEME).digest == quantize_with(without, cnn, one, SCHEME).digest


def uneven_data(rows: int, seed: int = 0) -> Dataset:
    return make_dataset({"x": np.random.default_rng(seed).standard_normal((rows, 5, 32)).astype(np.float32)}, None)


def test_equalising_changes_no_answer() -> None:
    model, rows = outliers.attention(50.0), uneven_data(40)
    found = equalized(model, rows, SCHEME)
    assert [step.name for step in found.provenance] == ["smooth-quant"]
    assert error(model, found, rows) < 1e-5  # sums of FP32 in another order


def test_an_equalisation_is_kept_only_if_rows_that_did_not_make_it_prove_it() -> None:
    """On fresh rows, no model loses more than a tenth, and models of uneven channels gain much."""
    rng = np.random.default_rng(5)
    mlp = networks.mlp()
    heavy = [make_dataset({"x": rng.standard_t(3, (count, 16)).astype(np.float32)}, None) for count in (100, 500)]
    uneven = uneven_data(40), uneven_data(200, 1)
    for model, (few, fresh), gain in ((mlp, heavy, 0.9), (outliers.attention(50.0), uneven, 5.0)):
        ready = equalized(model, few, SCHEME)
        recipe = PtqRecipe(RangeMethod.MSE, equalize=False)
        before, after = (error(model, quantize_with(recipe, each, few, SCHEME), fresh) for each in (model, ready))
        assert before > gain * after


def test_products_of_two_inputs_can_be_quantised() -> None:
    n = networks.Network()
    n.op("MatMul", "x", "z", name="y")
    model = n.artifact({"x": ["N", 4, 8], "z": ["N", 8, 4]}, {"y": ["N", 4, 4]})
    rng = np.random.default_rng(0)
    shapes = {"x": (32, 4, 8), "z": (32, 8, 4)}
    rows = make_dataset({name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}, None)
    check_float(model)
    found = quantize_with(PtqRecipe(placement=QdqPlacement.WIDE), model, rows, SCHEME)
    assert 0 < error(model, found, rows) < 0.03
    assert placed(model, StepContext(model, model, rows), "fastest", 1, 0.05) is not QdqPlacement.LINEAR
    with pytest.raises(Unsupported, match="no operator to quantise"):
        quantize_with(PtqRecipe(), model, rows, SCHEME)


def test_nothing_to_do() -> None:
    nothing = make_dataset({"x": np.zeros((4, 3), np.float32)}, None)
    model = models.identity(DataType.FP32)
    assert equalized(model, nothing, SCHEME).digest == model.digest
    with pytest.raises(Unsupported, match="no operator to quantise"):
        quantize_with(PtqRecipe(), model, nothing, SCHEME)


def test_a_model_without_weights_cannot_be_quantised() -> None:
    check_float(networks.mlp())
    with pytest.raises(Unsupported, match="no operator to quantise"):
        check_float(models.sum_and_difference())


def test_a_placement_is_timed_once_for_each_model() -> None:
    model = networks.mlp()
    context = StepContext(model, model, ROWS)
    assert placed(model, context, "wide", 1, 0.05) is QdqPlacement.WIDE
    assert not context.placements
    found = placed(model, context, "fastest", 1, 0.05)
    assert context.placements == {model.digest: found}
    context.placements[model.digest] = QdqPlacement.WIDE
    assert placed(model, context, "fastest", 1, 0.05) is QdqPlacement.WIDE


def test_channels_stay_without_equalisation() -> None:
    model, rows = outliers.attention(50.0), uneven_data(40)
    context = StepContext(model, model, rows)
    assert prepared(model, context, equalize=False) is model
    assert prepared(model, context, equalize=True).provenance
