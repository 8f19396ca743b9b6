from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import input_models
import models
from penstock.artifact import Artifact
from penstock.inputs.graph_signs import graph_meanings
from penstock.inputs.meaning import Meaning, Role
from penstock.tensor import DataType
from row_graphs import parsed


def meanings(artifact: Artifact) -> dict[str, Meaning]:
    return graph_meanings(input_models.graph_of(artifact), input_models.signature_of(artifact))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(0, 6), st.booleans(), st.integers(0, 1000))
def test_ids_are_exactly_those_of_the_table(rows: int, moves: int, transposed: bool, seed: int) -> None:
    artifact = input_models.text_encoder(rows, transposed, moves, seed)
    found = meanings(artifact)["input_ids"]
    assert (found.role, found.low, found.high) == (Role.TOKEN_IDS, (0.0,), (rows - 1.0,))
    ids = np.array([[rows - 1]], np.int64)
    others = {"token_type_ids": np.zeros((1, 1), np.int64), "attention_mask": np.ones((1, 1), np.int64)}
    # The model itself is the witness: the largest id is valid, the next one is not.
    assert input_models.runs(artifact, {"input_ids": ids, **others})
    assert not input_models.runs(artifact, {"input_ids": ids + 1, **others})


def test_the_smallest_table_counts() -> None:
    body = "a = Gather(t, x) b = Gather(u, x) y = Add(a, b)"
    weights = "float[9] t = {1, 2, 3, 4, 5, 6, 7, 8, 9}, float[3] u = {1, 2, 3}"
    found = meanings(parsed(body, "int64[N] x", "float[N] y", weights))
    assert found["x"].high == (2.0,)


def test_a_table_in_a_branch_or_a_loop_counts() -> None:
    loop = """
        y = Loop (count, keep, x) <
            body = one (int64 i, bool go, int64[N] now) => (bool still, int64[N] next) {
                still = Identity(go) found = Gather(t, now) next = Cast <to = 7> (found)
            }
        >
    """
    artifact = parsed(loop, "int64[N] x", "int64[N] y", "int64 count = {1}, bool keep = {1}, float[4] t = {0, 1, 2, 3}")
    assert meanings(artifact)["x"].high == (3.0,)


def test_a_table_that_is_an_input_is_no_limit() -> None:
    assert meanings(parsed("y = Gather(x, i)", "float[N, 4] x, int64[M] i", "float[M, 4] y")) == {}
    assert meanings(models.gather())["x"].high == (3.0,)


@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
def test_initial_states_and_lengths_of_recurrent_operators(operator: str) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator]
    cell = ", c" if operator == "LSTM" else ""
    artifact = models.artifact(
        [(operator, ["x", "w", "r", "", "n", "h", *(["c"] if cell else [])], ["", "y"])],
        [("x", 1, ["T", "N", 3]), ("n", 6, ["N"]), ("h", 1, [1, "N", 5]), *([("c", 1, [1, "N", 5])] if cell else [])],
        [("y", 1, [1, "N", 5])],
        {"w": input_models.weight(1, gates * 5, 3), "r": input_models.weight(1, gates * 5, 5)},
    )
    # The size of the state is an attribute, which the helper does not write.
    import onnx  # noqa: PLC0415 - only here

    model = onnx.load_model_from_string(artifact.data)
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("hidden_size", 5))
    found = meanings(Artifact.from_bytes(model.SerializeToString()))
    assert (found["h"].role, found["n"].role) == (Role.STATE, Role.LENGTHS)
    assert not cell or found["c"].role is Role.STATE


def test_a_table_model_says_its_columns() -> None:
    scaled = meanings(input_models.scaled_table())["x"]
    assert scaled.role is Role.FEATURES
    np.testing.assert_allclose(scaled.low, (8.0, -4.0, -700.0))
    np.testing.assert_allclose(scaled.high, (12.0, 4.0, -300.0))
    assert meanings(input_models.categories())["colour"].choices == (b"red", b"green", b"blue")


@pytest.mark.parametrize("threshold", [np.inf, -np.inf, float(np.finfo(np.float32).max)])
def test_a_threshold_that_only_tells_nan_is_no_range(threshold: float) -> None:
    found = meanings(input_models.stumps([0.0, 2.0, threshold]))["x"]
    assert found.role is Role.FEATURES
    assert (found.low, found.high) == ((-1.0,), (3.0,))


@pytest.mark.parametrize(
    ("artifact", "layout", "high"),
    [
        (input_models.image_net(), "NCHW", 1.0),
        (input_models.image_net(1), "NCHW", 1.0),
        (input_models.image_net(last=True), "NHWC", 1.0),
        (input_models.image_net(normalised=True), "NCHW", 255.0),
        (input_models.image_net(4, last=True, normalised=True), "NHWC", 255.0),
    ],
)
def test_images_by_their_convolution(artifact: Artifact, layout: str, high: float) -> None:
    found = meanings(artifact)["x"]
    assert (found.role, found.layout, found.low, found.high) == (Role.IMAGE, layout, (0.0,), (high,))


def test_a_convolution_of_many_channels_reads_no_image() -> None:
    assert meanings(input_models.image_net(16)) == {}


def test_audio_state_and_rate_of_a_voice_model() -> None:
    found = meanings(input_models.voice_activity())
    assert found["input"].role is Role.AUDIO
    assert found["sr"].choices == (8000,)


def test_a_mask_by_its_complement() -> None:
    body = "f = Cast <to = 1> (m) y = Sub (one, f)"
    found = meanings(parsed(body, "int64[N, L] m", "float[N, L] y", "float one = {1}"))
    assert found["m"].role is Role.MASK


def test_nothing_is_said_without_a_sign() -> None:
    assert meanings(models.linear()) == {}
    assert meanings(models.identity(DataType.INT64)) == {}
