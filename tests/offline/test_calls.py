"""Builds and single methods with samples that are whole calls, and samples of different sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import call_models
import penstock
from brief_builds import build
from penstock.artifact import Artifact
from penstock.bundle.open import open_bundle
from penstock.engines.registry import get_engine
from penstock.errors import InvalidData, Unsupported
from penstock.offline.build import Compression, Recipe
from penstock.offline.compress.functions import compress
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.judge.accuracy import answers_of
from penstock.offline.judge.contract import Contract
from penstock.offline.sessions import signature_of
from penstock.samples.open import open_data

INT8 = Recipe(engines=("onnxruntime",), threads=(1,), methods=(RangeMethod.MIN_MAX,), careful=False, timing_s=0.5)
LENGTHS = (3, 40, 3, 17, 40, 3)


def written(folder: Path, samples: list[dict[str, np.ndarray]], labels: list[int] | None = None) -> Path:
    folder.mkdir()
    for number, sample in enumerate(samples):
        more = {} if labels is None else {"labels": np.array(labels[number])}
        np.savez(folder / f"{number:03d}.npz", **sample, **more)
    return folder


def by_hand(model: Artifact, samples: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """The outputs of each call, without any of Penstock's own loops."""
    loaded = get_engine("onnxruntime").load(model, {"threads": 1})
    try:
        return [loaded.forward(sample) for sample in samples]
    finally:
        loaded.unload()


def test_a_model_with_a_scalar_and_a_state_is_built_from_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.offline.build.make_look", lambda *_: lambda *_: {})  # try INT8 even if it is slower
    model, calls = call_models.voice(), call_models.voice_calls(30)
    data = written(tmp_path / "calls", calls)
    result = build(model, tmp_path / "voice.bundle", data, recipe=INT8)
    evidence = result.evidence
    assert evidence.baseline.accuracy is not None
    assert evidence.baseline.accuracy.samples == 6
    assert any(record.precision == "int8" and record.accuracy is not None for record in evidence.candidates)
    assert (evidence.rows_per_call, result.manifest.serving.max_batch) == (1, 1)
    assert not any("rows of the model may depend" in note for note in evidence.notes)
    with penstock.open(tmp_path / "voice.bundle") as built:
        found = [built.infer(call) for call in calls[:5]]
    chosen = open_bundle(tmp_path / "voice.bundle")
    artifact = chosen.artifact(next(one for one in chosen.manifest.variants if one.name == evidence.chosen))
    for one, wanted in zip(found, by_hand(artifact, calls[:5]), strict=True):
        for name, array in wanted.items():
            np.testing.assert_array_equal(one[name], array)


def test_the_accuracy_of_a_model_of_calls_is_that_of_its_calls() -> None:
    model, calls = call_models.voice(), call_models.voice_calls(24, seed=1)
    labels = [one["speech"][0] + np.float32(0.01) for one in by_hand(model, calls)]
    labelled = [{**call, "labels": label} for call, label in zip(calls, labels, strict=True)]
    outcome = compress.quantize(
        model, call_models.voice_calls(40), labelled, budget_s=0.2, metric="mae", metric_output="speech"
    )
    found = np.concatenate([one["speech"][0] for one in by_hand(outcome.model, calls)])
    assert outcome.comparison is not None
    assert outcome.comparison.accuracy.value == pytest.approx(np.abs(found - np.concatenate(labels)).mean(), rel=1e-3)
    assert outcome.comparison.accuracy.samples == 24
    assert "quantize" in [step.name for step in outcome.model.provenance]


def test_samples_of_different_sizes_are_calibrated_judged_and_timed_at_their_sizes(tmp_path: Path) -> None:
    model, samples = call_models.text(), call_models.texts(LENGTHS * 6, seed=2)
    labels = [int(one["logits"].argmax()) for one in by_hand(model, samples)]
    data = written(tmp_path / "texts", samples, labels)
    result = build(model, tmp_path / "text.bundle", call_models.texts(LENGTHS * 8), data, recipe=INT8)
    evidence = result.evidence
    assert evidence.metric == "top-1"
    opened = open_bundle(tmp_path / "text.bundle")
    artifact = opened.artifact(next(one for one in opened.manifest.variants if one.name == evidence.chosen))
    right = [one["logits"].argmax() == label for one, label in zip(by_hand(artifact, samples), labels, strict=True)]
    assert result.chosen.accuracy is not None
    assert result.chosen.accuracy.value == pytest.approx(np.mean(right))
    gains = [] if evidence.chosen.startswith("original") else [(1, 3), (1, 17), (1, 40)]
    assert [gain.shapes["ids"] for gain in evidence.by_size] == gains


def test_the_comparison_of_a_method_has_the_gain_by_size() -> None:
    model = call_models.text()
    outcome = compress.quantize(model, call_models.texts(LENGTHS * 4), call_models.texts(LENGTHS, seed=3), budget_s=0.2)
    assert outcome.comparison is not None
    gains = outcome.comparison.by_size
    assert [gain.share for gain in gains] == pytest.approx([1 / 2, 1 / 6, 1 / 3])
    assert all(gain.speedup.low <= gain.original_ms / gain.chosen_ms * 1.5 for gain in gains)
    assert len(outcome.summary()["by_size"]) == 3


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_statistics_do_not_depend_on_the_order_or_batches_of_sizes(batch: int) -> None:
    model, samples = call_models.text(), call_models.texts(LENGTHS * 3)
    signature = signature_of(model)
    alone = collect(model, open_data(samples, signature), batch_size=1)
    mixed = collect(model, open_data(samples[::-1], signature), batch_size=batch)
    for name, known in alone.items():
        assert mixed[name].histogram.count == known.histogram.count
        np.testing.assert_allclose(
            [mixed[name].histogram.min, mixed[name].histogram.max],
            [known.histogram.min, known.histogram.max],
            rtol=1e-5,
        )


def test_outputs_of_different_sizes_are_compared_sample_by_sample() -> None:
    model, samples = call_models.text(per_token=True), call_models.texts(LENGTHS)
    data = open_data(samples, signature_of(model))
    found = answers_of(model, data)["logits"]
    assert found.shape == (6, 40, 4)
    for row, wanted in zip(found, by_hand(model, samples), strict=True):
        length = wanted["logits"].shape[1]
        np.testing.assert_allclose(row[:length], wanted["logits"][0], atol=1e-6)
        assert not row[length:].any()


def test_per_token_outputs_are_built(tmp_path: Path) -> None:
    model, samples = call_models.text(per_token=True), call_models.texts(LENGTHS * 5)
    recipe = Recipe(
        Contract(max_output_error=0.5), engines=("onnxruntime",), threads=(1,), methods=(), careful=False, budget_s=0.2
    )
    result = build(model, tmp_path / "tokens.bundle", None, samples, recipe)
    assert result.evidence.metric == "fidelity"


def test_a_model_that_rejects_a_sample_names_it(tmp_path: Path) -> None:
    samples = call_models.texts(LENGTHS)
    samples[4]["ids"][0, 0] = call_models.VOCABULARY + 7
    with pytest.raises(InvalidData, match=r"(out of bounds|indices element).*sample 4"):
        build(call_models.text(), tmp_path / "text.bundle", None, samples, INT8)


def test_training_and_plans_need_rows_of_equal_shapes(tmp_path: Path) -> None:
    recipe = Recipe(engines=("onnxruntime",), threads=(1,), compression=Compression(budget_s=1))
    with pytest.raises(Unsupported, match="the compression plan needs rows of equal shapes"):
        build(call_models.text(), tmp_path / "text.bundle", call_models.texts(LENGTHS * 4), None, recipe)
    with pytest.raises(Unsupported, match="training needs rows of equal shapes"):
        compress.qat(call_models.voice(), call_models.voice_calls(20))


def test_labels_of_different_lengths_are_judged_without_their_padding(tmp_path: Path) -> None:
    model, samples = call_models.text(per_token=True), call_models.texts(LENGTHS * 5)
    outputs = [one["logits"][0] for one in by_hand(model, samples)]
    data = [{**sample, "labels": scores.argmax(axis=1)} for sample, scores in zip(samples, outputs, strict=True)]
    recipe = Recipe(
        Contract(metric="perplexity"), engines=("onnxruntime",), threads=(1,), methods=(), careful=False, budget_s=0.2
    )
    baseline = build(model, tmp_path / "tokens.bundle", None, data, recipe).evidence.baseline
    scores = np.concatenate(outputs).astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    losses = np.log(np.exp(scores).sum(axis=1))  # the label is the highest score, which is now 0
    assert baseline.accuracy is not None
    assert baseline.accuracy.value == pytest.approx(np.exp(losses.mean()), rel=1e-4)
