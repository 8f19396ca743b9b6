from __future__ import annotations

import pytest

import input_models
from penstock.artifact import Artifact
from penstock.inputs.meaning import Meaning, Role
from penstock.inputs.meanings import meanings_of, words_of
from penstock.tensor import DataType, Signature, TensorSpec

FP32, INT64 = DataType.FP32, DataType.INT64


def spec(name: str, datatype: DataType, *shape: int) -> TensorSpec:
    return TensorSpec(name, datatype, shape)


def one(name: str, datatype: DataType, *shape: int, outputs: tuple[TensorSpec, ...] = ()) -> Meaning:
    """The meaning of a single input without a graph."""
    return meanings_of(Signature((spec(name, datatype, *shape),), outputs))[name]


def of(artifact: Artifact) -> dict[str, Meaning]:
    return meanings_of(input_models.signature_of(artifact), input_models.graph_of(artifact))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attentionMask_1", ("attention", "mask", "1")),
        ("past_key_values.0.key", ("past", "key", "values", "0", "key")),
        ("stateN", ("state", "n")),
        ("h0", ("h", "0")),
        ("XMLHttp", ("xml", "http")),
        ("", ()),
    ],
)
def test_words_of_a_name(name: str, words: tuple[str, ...]) -> None:
    assert words_of(name) == words


@pytest.mark.parametrize(
    ("name", "datatype", "shape", "role"),
    [
        ("input_ids", INT64, (-1, -1), Role.TOKEN_IDS),
        ("token_type_ids", INT64, (-1, -1), Role.TOKEN_TYPES),
        ("position_ids", INT64, (-1, -1), Role.POSITIONS),
        ("attention_mask", INT64, (-1, -1), Role.MASK),
        ("x", DataType.BOOL, (-1, 8), Role.MASK),
        ("x_lens", INT64, (-1,), Role.LENGTHS),
        ("input_lengths", DataType.INT32, (-1, 1), Role.LENGTHS),
        ("sr", INT64, (), Role.SAMPLING_RATE),
        ("sample_rate", INT64, (1,), Role.SAMPLING_RATE),
        ("waveform", FP32, (-1, -1), Role.AUDIO),
        ("mel", FP32, (-1, -1, 80), Role.SPECTRUM),
        ("pixel_values", FP32, (-1, 3, 224, 224), Role.IMAGE),
        ("x", FP32, (-1, 3, -1, -1), Role.IMAGE),
        ("x", DataType.UINT8, (-1, 100, 100, 3), Role.IMAGE),
        ("im_shape", FP32, (-1, 2), Role.IMAGE_SIZE),
        ("x", FP32, (-1, 20), Role.FEATURES),
        ("x", FP32, (-1,), Role.FEATURES),
        ("x", FP32, (), Role.SCALAR),
        ("training", DataType.BOOL, (), Role.SCALAR),
        ("x", INT64, (-1, -1), Role.TOKEN_IDS),
        ("x", DataType.BYTES, (-1,), Role.TEXT),
        ("x", FP32, (-1, 7, 9, 11), Role.TENSOR),
        # A word of the name counts only if type and shape allow the role.
        ("mask", DataType.BYTES, (-1,), Role.TEXT),
        ("length", FP32, (-1, 5), Role.FEATURES),
        ("image", FP32, (-1, 5), Role.FEATURES),
    ],
)
def test_roles_by_name_and_shape(name: str, datatype: DataType, shape: tuple[int, ...], role: Role) -> None:
    assert one(name, datatype, *shape).role is role


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("state", "stateN"),
        ("h0", "hn"),
        ("cache_in", "cache_out"),
        ("past_key_values.0.key", "present.0.key"),
        ("past_key_values.11.value", "present.11.value"),
        ("hidden_state", "new_hidden_state"),
        ("h", "h_out"),
    ],
)
def test_a_state_is_returned_under_a_related_name(name: str, output: str) -> None:
    outputs = (spec("y", FP32, -1, 2), spec(output, FP32, 2, -1, 8))
    found = one(name, FP32, 2, -1, 8, outputs=outputs)
    assert (found.role, found.partner) == (Role.STATE, output)
    other = (spec("y", FP32, -1, 2), spec(output, FP32, 3, -1, 8))
    assert one(name, FP32, 2, -1, 8, outputs=other).role is not Role.STATE


def test_layers_of_a_cache_are_told_apart() -> None:
    names = [f"past_key_values.{layer}.{kind}" for layer in (0, 1, 10) for kind in ("key", "value")]
    inputs = tuple(spec(name, FP32, -1, 4, -1, 8) for name in names)
    outputs = tuple(spec(name.replace("past_key_values", "present"), FP32, -1, 4, -1, 8) for name in names)
    found = meanings_of(Signature(inputs, outputs))
    assert [found[name].partner for name in names] == [each.name for each in outputs]


def test_an_image_to_image_model_has_no_state() -> None:
    outputs = (spec("output", FP32, -1, 3, -1, -1),)
    assert one("input", FP32, -1, 3, -1, -1, outputs=outputs).role is Role.IMAGE


def test_the_graph_is_stronger_than_the_name() -> None:
    found = of(input_models.text_encoder(50))
    assert (found["input_ids"].role, found["input_ids"].high) == (Role.TOKEN_IDS, (49.0,))
    assert (found["token_type_ids"].role, found["token_type_ids"].high) == (Role.TOKEN_TYPES, (1.0,))
    assert found["attention_mask"].role is Role.MASK


def test_a_voice_model() -> None:
    found = of(input_models.voice_activity())
    assert [found[name].role for name in ("input", "state", "sr")] == [Role.AUDIO, Role.STATE, Role.SAMPLING_RATE]
    assert found["state"].partner == "stateN"


def test_a_float_beside_a_sampling_rate_is_audio() -> None:
    inputs = (spec("x", FP32, -1, -1), spec("sr", INT64))
    assert meanings_of(Signature(inputs, ()))["x"].role is Role.AUDIO


def test_several_columns_are_a_table() -> None:
    inputs = (spec("age", INT64, -1, 1), spec("city", DataType.BYTES, -1, 1))
    assert {one.role for one in meanings_of(Signature(inputs, ())).values()} == {Role.FEATURES}
    assert one("city", DataType.BYTES, -1, 1).role is Role.TEXT


def test_lengths_measure_the_first_long_input() -> None:
    inputs = (spec("x_lens", INT64, -1), spec("x", FP32, -1, -1, 80))
    assert meanings_of(Signature(inputs, ()))["x_lens"].partner == "x"
