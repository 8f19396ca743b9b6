from __future__ import annotations

import itertools

import numpy as np
import pytest

import input_models
import models
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, InvalidModel
from penstock.inputs.meanings import meanings_of
from penstock.offline.sessions import loaded
from penstock.offline.synthetic import (
    check_synthetic,
    default_count,
    samples,
    stacked,
    synthesize,
    synthetic_data,
    synthetic_notes,
)
from penstock.tensor import DataType, Signature, TensorSpec
from row_graphs import parsed


@pytest.mark.parametrize(
    "artifact",
    [
        input_models.text_encoder(7),
        input_models.image_net(size=16),
        input_models.scaled_table(),
        input_models.categories(),
        models.fixed_batch(),
        models.gather(),
    ],
)
def test_the_model_runs_on_every_sample(artifact: Artifact) -> None:
    first, second = synthesize(artifact, 12, parts=2)
    with loaded(artifact) as model:
        for call in (*first, *second):
            model.signature.check(call)
            model.forward(call)
    assert (len(first), len(second)) == (12, 12)


def test_samples_differ_and_are_the_same_every_time() -> None:
    one, other = synthesize(input_models.image_net(size=16), 5), synthesize(input_models.image_net(size=16), 5)
    assert len({call["x"].tobytes() for call in one[0]}) == 5
    assert [call["x"].tobytes() for call in one[0]] == [call["x"].tobytes() for call in other[0]]


def test_the_state_is_the_one_that_the_model_returned() -> None:
    artifact = input_models.voice_activity()
    (calls,) = synthesize(artifact, 20)
    with loaded(artifact) as model:
        for number, (before, after) in enumerate(itertools.pairwise(calls), 1):
            want = model.forward(before)["stateN"] if number % 8 else np.zeros((2, 1, 8), np.float32)
            np.testing.assert_array_equal(after["state"], want)
    assert {int(call["sr"]) for call in calls} <= {8000, 16000}


def test_without_a_model_states_stay_zero() -> None:
    artifact = input_models.voice_activity()
    signature = input_models.signature_of(artifact)
    meanings = meanings_of(signature, input_models.graph_of(artifact))
    shapes = {"input": (1, 512), "state": (2, 1, 8), "sr": ()}
    assert not any(call["state"].any() for call in samples(signature, meanings, shapes, 9))


def test_a_model_that_rejects_all_samples_is_an_error_with_the_reason() -> None:
    artifact = parsed("y = Reshape(x, s)", "float[N, 5] x", "float[7, 1] y", "int64[2] s = {7, 1}")
    with pytest.raises(InvalidModel, match=r"rejects all synthetic samples: .* on x \[1, 5\]"):
        synthesize(artifact, 4)


def test_calls_are_joined_along_the_axis_of_rows_or_a_new_one() -> None:
    assert [one["x"].shape for one in synthetic_data(models.linear(), 30)] == [(30, 3), (30, 3)]
    voice, _ = synthetic_data(input_models.voice_activity(), 4)
    assert {name: array.shape for name, array in voice.items()} == {
        "input": (4, 1, 512),
        "state": (4, 2, 1, 8),
        "sr": (4,),
    }
    fixed = Signature((TensorSpec("x", DataType.FP32, (4, 3)),), ())
    assert stacked([{"x": np.zeros((4, 3), np.float32)}] * 3, fixed)["x"].shape == (12, 3)


@pytest.mark.parametrize(
    ("shapes", "rows"),
    [
        ([(-1, 3)], True),
        ([(-1, 3), (-1,)], True),
        ([(4, 3), (4,)], True),
        ([(-1, 3), (4,)], False),
        ([(-1, 3), ()], False),
        ([(-1, 3), (2, -1, 8)], False),
    ],
)
def test_rows_are_counted_by_the_first_axis_of_every_input(shapes: list[tuple[int, ...]], rows: bool) -> None:
    specs = tuple(TensorSpec(f"x{n}", DataType.FP32, shape) for n, shape in enumerate(shapes))
    assert Signature(specs, ()).has_rows is rows


def test_the_number_of_samples_is_bounded_by_their_size() -> None:
    signature = Signature((TensorSpec("x", DataType.FP32, (-1, -1)),), ())
    assert default_count(signature, {"x": (1, 10)}) == 256
    assert default_count(signature, {"x": (1, 1 << 18)}) == 64
    assert default_count(signature, {"x": (1, 1 << 24)}) == 16


def test_samples_that_do_not_fit_in_memory_are_not_made() -> None:
    with pytest.raises(InvalidArgument, match=r"--synthetic 1000000000: these samples take \d+\.\d GiB, and at most"):
        synthesize(models.linear(), 10**9)


def test_synthetic_samples_go_neither_with_data_nor_with_a_proof() -> None:
    with pytest.raises(InvalidArgument, match="cannot be combined with --calibrate"):
        check_synthetic(has_data=True, prove_accuracy=False)
    with pytest.raises(InvalidArgument, match="--prove-accuracy needs real data"):
        check_synthetic(has_data=False, prove_accuracy=True)
    check_synthetic(has_data=False, prove_accuracy=False)
    (note,) = synthetic_notes(64)
    assert "64 synthetic samples" in note
    assert "unknown on real data" in note
    assert synthetic_notes(0) == ()
