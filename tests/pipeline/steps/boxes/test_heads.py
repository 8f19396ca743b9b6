"""Raw outputs of detectors, written as the models write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.boxes.heads import DecodeDetr, DecodeSsd, DecodeYolo
from penstock.pipeline.value import ValueType
from penstock.tensor import Array


def random(*shape: int, seed: int = 0) -> Array:
    """Random numbers from 0 to 1."""
    return np.random.default_rng(seed).random(shape, np.float32)


def xyxy(centres: Array) -> Array:
    """Corners of boxes, as Ultralytics computes them."""
    tensor = torch.from_numpy(centres)
    half = tensor[:, 2:] / 2
    found: Array = torch.cat([tensor[:, :2] - half, tensor[:, :2] + half], 1).numpy()
    return found


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 99))
def test_yolo(anchors: int, classes: int, seed: int) -> None:
    rows = random(anchors, 5 + classes, seed=seed)
    rows[:, :4] *= 640
    confidences = rows[:, 5:] * rows[:, 4:5]
    kept = np.flatnonzero(confidences.max(1) >= 0.25) if anchors else np.zeros(0, int)
    found = DecodeYolo(version="v5", classes=classes).run({"value": rows})
    np.testing.assert_array_equal(found["boxes"], xyxy(rows[:, :4])[kept])
    np.testing.assert_array_equal(found["scores"], confidences.max(1)[kept])
    np.testing.assert_array_equal(found["classes"], confidences.argmax(1)[kept])
    newer = np.concatenate([rows[:, :4], confidences], 1).T
    again = DecodeYolo().run({"value": newer})
    for name in found:
        np.testing.assert_array_equal(again[name], found[name])


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 99))
def test_yolo_with_logits(anchors: int, classes: int, seed: int) -> None:
    rows = (random(anchors, 5 + classes, seed=seed) - 0.6) * 12
    probabilities = rows.copy()
    probabilities[:, 4:] = torch.from_numpy(rows[:, 4:]).sigmoid().numpy()
    for version, drop in (("v5", []), ("v8", [4])):
        pair = (np.delete(one, drop, axis=1) for one in (rows, probabilities))
        logits, wanted = (one.T if version == "v8" else one for one in pair)
        found = DecodeYolo(version=version, activation="sigmoid").run({"value": logits})  # type: ignore[arg-type]
        expected = DecodeYolo(version=version).run({"value": wanted})  # type: ignore[arg-type]
        for name in ("boxes", "classes"):
            np.testing.assert_array_equal(found[name], expected[name])
        np.testing.assert_allclose(found["scores"], expected["scores"], atol=1e-6)


@pytest.mark.parametrize("wrong", [-0.3, -4.0, 1.1, 7.0, np.inf])
@pytest.mark.parametrize("version", ["v5", "v8"])
def test_one_number_that_is_no_probability_is_refused(version: Any, wrong: float) -> None:
    """Logits are mostly negative, so even those whose greatest looks like a probability are found."""
    rows = np.full((50, 9), 0.2, np.float32)
    rows[17, 6] = wrong
    value = rows.T if version == "v8" else rows
    with pytest.raises(InvalidInput, match=rf"'value' contains {wrong:.4g}, which is no probability") as raised:
        DecodeYolo(version=version, threshold=1).run({"value": value})
    assert "activation: sigmoid" in raised.value.hint
    rows[17, 6] = 1.04 if wrong > 1 else -0.04  # the rounding of a quantised model
    assert DecodeYolo(version=version).run({"value": value})["boxes"].shape[1] == 4


def test_probabilities_and_logits_are_not_confused_by_other_heads() -> None:
    boxes = random(5, 4)
    scores = random(5, 3, seed=1)
    with pytest.raises(InvalidInput, match="between 0 and 1, as probabilities are"):
        DecodeDetr().run({"logits": scores, "boxes": boxes})
    found = DecodeDetr(activation="none", threshold=0).run({"logits": scores, "boxes": boxes})
    np.testing.assert_array_equal(found["scores"], scores.max(1))
    with pytest.raises(InvalidInput, match="'logits' contains -2, which is no probability"):
        DecodeDetr(activation="none").run({"logits": scores - 2 - scores.min(), "boxes": boxes})
    with pytest.raises(InvalidInput, match="'logits' contains 3, which is no probability"):
        DecodeSsd(softmax=False).run({"logits": np.full((5, 3), 3, np.float32), "boxes": boxes, "priors": boxes})


def test_a_transposed_output_is_refused() -> None:
    step = DecodeYolo(classes=80)
    assert step.check({"value": ValueType(shape=(84, 8400))})["boxes"].shape == (-1, 4)
    with pytest.raises(InvalidConfig, match=r"floating-point numbers \[84, n\]"):
        step.check({"value": ValueType(shape=(8400, 84))})
    with pytest.raises(InvalidInput, match="not that of YOLO v8"):
        step.run({"value": random(8400, 84)})
    with pytest.raises(InvalidInput, match="not that of YOLO v5"):
        DecodeYolo(version="v5").run({"value": random(3, 5)})
    with pytest.raises(InvalidInput, match="not two dimensions"):
        step.run({"value": random(1, 84, 8400)})
    with pytest.raises(InvalidInput, match="NaN"):
        step.run({"value": np.full((84, 3), np.nan, np.float32)})


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(2, 6), st.integers(0, 99))
def test_detr(queries: int, classes: int, seed: int) -> None:
    logits, boxes = (random(queries, classes, seed=seed) - 0.5) * 200, random(queries, 4, seed=seed + 1)
    for activation, wanted in (
        ("sigmoid", torch.from_numpy(logits).sigmoid()),
        ("softmax", torch.from_numpy(logits).softmax(-1)[:, :-1]),
    ):
        found = DecodeDetr(activation=activation, threshold=0.5).run({"logits": logits, "boxes": boxes})  # type: ignore[arg-type]
        scores, best = wanted.max(-1)
        kept = (scores >= 0.5).numpy()
        np.testing.assert_allclose(found["scores"], scores.numpy()[kept], atol=1e-6)
        np.testing.assert_array_equal(found["boxes"], xyxy(boxes)[kept])
        np.testing.assert_array_equal(
            np.take_along_axis(wanted.numpy()[kept], found["classes"][:, None], 1)[:, 0], scores.numpy()[kept]
        )
        assert len(best) == queries


def test_ssd() -> None:
    priors = np.array([[0.5, 0.5, 0.2, 0.4]], np.float32)
    inputs = {
        "logits": np.array([[0, 1, 5]], np.float32),
        "boxes": np.array([[1, -1, 0, np.log(2) / 0.2]], np.float32),
        "priors": priors,
    }
    found = DecodeSsd().run(inputs)
    np.testing.assert_allclose(found["boxes"], [[0.42, 0.06, 0.62, 0.86]], atol=1e-6)
    assert found["classes"].tolist() == [1]
    assert found["scores"][0] == pytest.approx(np.exp(5) / (1 + np.exp(1) + np.exp(5)))
    for step in (DecodeSsd(), DecodeDetr(activation="softmax")):
        with pytest.raises(InvalidInput, match="'logits' contains NaN"):
            step.run({**inputs, "logits": np.array([[0, 1, np.inf]], np.float32)})
    far = DecodeSsd().run({**inputs, "boxes": np.full((1, 4), 1e6, np.float32)})
    assert np.isfinite(far["boxes"]).all()
    with pytest.raises(InvalidInput, match=r"'logits' has the shape \[1, 3\], and 'priors' \[2, 4\]"):
        DecodeSsd().run({**inputs, "priors": np.ones((2, 4), np.float32)})
    types = {"logits": ValueType(shape=(-1, 3)), "boxes": ValueType(shape=(-1, 4)), "priors": ValueType(shape=(9, 4))}
    assert DecodeSsd().check(types)["scores"].shape == (-1,)
