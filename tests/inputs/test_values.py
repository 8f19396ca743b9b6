from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import input_models
from penstock.artifact import Artifact
from penstock.inputs.meaning import Meaning, Role
from penstock.inputs.meanings import meanings_of
from penstock.inputs.sizes import shapes_to_try
from penstock.inputs.values import draw, plausible
from penstock.tensor import DataType, Signature, TensorSpec

TYPES = st.sampled_from(list(DataType))
SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)
BOUNDS = st.floats(-1e3, 1e3)


def make(spec: TensorSpec, meaning: Meaning, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    signature = Signature((spec,), ())
    return plausible(signature, {spec.name: meaning}, {spec.name: shape}, np.random.default_rng(seed))[spec.name]


@given(TYPES, SHAPES, st.sampled_from(list(Role)), st.integers(0, 100))
def test_every_role_has_values_of_every_type_and_shape(
    datatype: DataType, shape: tuple[int, ...], role: Role, seed: int
) -> None:
    spec = TensorSpec("x", datatype, shape)
    if datatype is DataType.BYTES and role not in (Role.TEXT, Role.FEATURES, Role.TENSOR):
        return
    spec.check(make(spec, Meaning(role, "test"), shape, seed))


@given(st.sampled_from([DataType.FP32, DataType.INT64, DataType.INT8]), SHAPES, BOUNDS, BOUNDS, st.integers(0, 50))
def test_values_stay_in_their_range(
    datatype: DataType, shape: tuple[int, ...], one: float, other: float, seed: int
) -> None:
    low, high = sorted((np.floor(one), np.ceil(other)))
    meaning = Meaning(Role.FEATURES, "test", (float(low),), (float(high),))
    array = make(TensorSpec("x", datatype, shape), meaning, shape, seed)
    limits = (low, high) if datatype is not DataType.INT8 else np.clip((low, high), -128, 127)
    assert array.min() >= limits[0]
    assert array.max() <= limits[1]


@pytest.mark.parametrize(
    "artifact",
    [
        input_models.text_encoder(3, moves=3),
        input_models.text_encoder(1),
        input_models.image_net(),
        input_models.image_net(last=True, normalised=True, size=40),
        input_models.voice_activity(),
        input_models.scaled_table(),
        input_models.categories(),
    ],
)
def test_the_model_accepts_plausible_values(artifact: Artifact) -> None:
    signature = input_models.signature_of(artifact)
    meanings = meanings_of(signature, input_models.graph_of(artifact))
    for shapes in shapes_to_try(signature, meanings):
        for seed in range(5):
            inputs = plausible(signature, meanings, shapes, np.random.default_rng(seed))
            for spec in signature.inputs:
                spec.check(inputs[spec.name])
            assert input_models.runs(artifact, inputs)


def test_columns_have_their_own_ranges() -> None:
    meaning = Meaning(Role.FEATURES, "test", (0.0, 100.0), (1.0, 200.0))
    array = make(TensorSpec("x", DataType.FP32, (-1, 2)), meaning, (500, 2))
    assert array[:, 0].max() <= 1
    assert array[:, 1].min() >= 100


def test_a_mask_is_one_and_then_zero() -> None:
    array = make(TensorSpec("m", DataType.INT64, (-1, -1)), Meaning(Role.MASK, "test"), (50, 20))
    assert set(np.unique(array)) == {0, 1}
    assert (np.diff(array, axis=1) <= 0).all()
    assert (array[:, 0] == 1).all()
    assert array[0].all()


def test_lengths_lie_within_what_they_measure_and_agree_with_the_mask() -> None:
    specs = (
        TensorSpec("x", DataType.FP32, (-1, -1, 80)),
        TensorSpec("n", DataType.INT32, (-1,)),
        TensorSpec("m", DataType.BOOL, (-1, -1)),
    )
    meanings = {
        "x": Meaning(Role.SPECTRUM, "test"),
        "n": Meaning(Role.LENGTHS, "test", partner="x"),
        "m": Meaning(Role.MASK, "test"),
    }
    shapes = {"x": (30, 17, 80), "n": (30,), "m": (30, 17)}
    inputs = plausible(Signature(specs, ()), meanings, shapes, np.random.default_rng(0))
    assert 1 <= inputs["n"].min() <= inputs["n"].max() <= 17
    assert np.abs(inputs["m"].sum(axis=1) - inputs["n"]).max() <= 1


def test_states_are_zero_images_are_smooth_and_audio_is_quiet() -> None:
    assert not make(TensorSpec("s", DataType.FP32, (2, -1, 8)), Meaning(Role.STATE, "test"), (2, 1, 8)).any()
    image = make(
        TensorSpec("i", DataType.FP32, (-1, 3, -1, -1)), Meaning(Role.IMAGE, "t", layout="NCHW"), (1, 3, 64, 64)
    )
    assert 0 <= image.min() < image.max() <= 1
    assert np.abs(np.diff(image, axis=2)).mean() < image.std() / 2
    audio = make(TensorSpec("a", DataType.FP32, (-1, -1)), Meaning(Role.AUDIO, "test"), (1, 16_000))
    assert 0 < np.abs(audio).max() < 0.5
    pixels = make(
        TensorSpec("i", DataType.UINT8, (-1, -1, -1, 3)),
        Meaning(Role.IMAGE, "t", (0,), (255,), layout="NHWC"),
        (1, 9, 9, 3),
    )
    assert pixels.max() > 100


def test_the_size_of_an_image_is_that_of_the_image() -> None:
    specs = (TensorSpec("x", DataType.FP32, (-1, 3, -1, -1)), TensorSpec("im_shape", DataType.FP32, (-1, 2)))
    meanings = meanings_of(Signature(specs, ()))
    inputs = plausible(
        Signature(specs, ()), meanings, {"x": (1, 3, 48, 320), "im_shape": (1, 2)}, np.random.default_rng(0)
    )
    assert inputs["im_shape"].tolist() == [[48.0, 320.0]]


@pytest.mark.parametrize("kind", ["normal", "zeros", "large", "negative"])
@given(datatype=TYPES, shape=SHAPES)
def test_values_of_one_kind(kind, datatype: DataType, shape: tuple[int, ...]) -> None:
    array = draw(TensorSpec("x", datatype, shape), shape, kind, np.random.default_rng(0))
    assert (array.dtype, array.shape) == (datatype.dtype, shape)
    if datatype.is_float and kind == "negative":
        assert (array <= 0).all()
    if not datatype.is_float and datatype is not DataType.BYTES and kind == "normal":
        assert array.max() <= 1


def test_bounds_of_infinity_bound_nothing() -> None:
    spec = TensorSpec("x", DataType.FP32, (-1, 3))
    bounds = Meaning(Role.FEATURES, "", low=(-np.inf, 0.0, -np.inf), high=(5.0, np.inf, np.inf))
    found = plausible(Signature((spec,), ()), {"x": bounds}, {"x": (100, 3)}, np.random.default_rng(0))["x"]
    assert np.isfinite(found).all()
    assert found[:, 0].max() <= 5.0
    assert found[:, 1].min() >= 0.0
