"""What judges when nobody says so."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from penstock.errors import InvalidArgument, InvalidData
from penstock.offline.judge.detect import choose_metric, has_class_scores, scored_output

RNG = np.random.default_rng
LOGITS = RNG(0).normal(size=(40, 5)).astype(np.float32)
WIDE = RNG(0).normal(size=(40, 96)).astype(np.float32)
PROBABILITIES = special.softmax(LOGITS, axis=1)
CLASSES = np.arange(40) % 5
UNIT = LOGITS / np.linalg.norm(LOGITS, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("answers", "metric", "judged"),
    [
        ({"y": PROBABILITIES}, "agreement", ("y",)),
        ({"logits": LOGITS}, "agreement", ("logits",)),
        ({"label": CLASSES, "probabilities": PROBABILITIES}, "agreement", ("probabilities", "label")),
        ({"hidden": WIDE[:, :, None], "logits": LOGITS}, "agreement", ("logits",)),
        ({"mask": np.ones((40, 3, 3), np.int64)}, "agreement", ("mask",)),
        ({"text": np.array(["a"] * 40, object)}, "agreement", ("text",)),
        ({"y": LOGITS}, "fidelity", ("y",)),
        ({"y": LOGITS[:, :2] + 100}, "fidelity", ("y",)),
        ({"landmarks": WIDE + 100}, "fidelity", ("landmarks",)),
        ({"y": LOGITS[:, 0]}, "fidelity", ("y",)),
        ({"boxes": WIDE[:, :, None], "scores": LOGITS}, "fidelity", ("boxes", "scores")),
        ({"embedding": UNIT}, "cosine", ("embedding",)),
        ({"last": WIDE}, "cosine", ("last",)),
        ({"e": UNIT[:, :2] / np.linalg.norm(UNIT[:, :2], axis=1, keepdims=True)}, "cosine", ("e",)),
        ({"sign": np.sign(LOGITS[:, :1])}, "fidelity", ("sign",)),
        ({"tokens": np.sign(WIDE).astype(np.int64), "y": LOGITS}, "fidelity", ("tokens", "y")),
    ],
)
def test_without_labels_only_certain_classes_are_judged_by_the_highest_score(
    answers: dict, metric: str, judged: tuple[str, ...]
) -> None:
    choice = choose_metric(answers, None)
    assert (choice.metric.name, choice.outputs) == (metric, judged)
    assert choice.reason


@pytest.mark.parametrize(
    ("answers", "labels", "metric"),
    [
        ({"y": LOGITS}, CLASSES, "top-1"),
        ({"y": CLASSES}, CLASSES, "top-1"),
        ({"y": LOGITS[:, :1]}, CLASSES % 2, "top-1"),
        ({"y": LOGITS}, (LOGITS > 0).astype(int), "average-precision"),
        ({"y": LOGITS[:, 0]}, LOGITS[:, 0], "r2"),
        ({"y": LOGITS[:, :1]}, CLASSES * 7, "r2"),
        ({"y": LOGITS}, LOGITS, "r2"),
        ({"y": np.zeros((40, 5, 4, 4), np.float32)}, np.ones((40, 4, 4), int), "top-1"),
        ({"y": np.array(["a b"] * 40, object)}, np.array(["a b"] * 40), "top-1"),
    ],
)
def test_labels_choose_the_metric(answers: dict, labels: np.ndarray, metric: str) -> None:
    assert choose_metric(answers, labels).metric.name == metric


def test_the_output_with_enough_classes_is_judged() -> None:
    answers = {"two": LOGITS[:, :2], "scores": LOGITS}
    assert choose_metric(answers, CLASSES).outputs == ("scores",)
    assert scored_output(answers, CLASSES) == "scores"


@pytest.mark.parametrize("metric", ["", "top-1", "f1"])
def test_class_scores_are_judged_rather_than_wider_features(metric: str) -> None:
    random = np.random.default_rng(0)
    answers = {name: random.normal(size=(30, columns)) for name, columns in (("features", 16), ("few", 2), ("y", 3))}
    labels = np.arange(30) % 3
    choice = choose_metric(answers, labels, metric)
    assert choice.outputs == (scored_output(answers, labels),) == ("y",)
    assert choice.reason.endswith("that suits the metric and has no more columns than the labels have classes")


def test_labels_that_fit_no_output_are_refused() -> None:
    with pytest.raises(InvalidData, match=r"labels go up to 7, but no output suits the labels.*\{'y': \[40, 5\]\}"):
        choose_metric({"y": LOGITS}, CLASSES + 3)
    with pytest.raises(InvalidData, match="labels go up to 7"):
        scored_output({"y": LOGITS}, CLASSES + 3)
    with pytest.raises(InvalidData, match="no output suits the labels"):
        choose_metric({"y": LOGITS}, LOGITS[:, :3])


def test_class_numbers_in_floats_are_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidData, match="no output suits the labels") as error:
        choose_metric({"y": LOGITS}, CLASSES.astype(np.float32))
    assert (error.value.hint or "").startswith("store class numbers as integers")


def test_a_named_metric_that_does_not_fit_is_refused_with_what_it_takes() -> None:
    with pytest.raises(InvalidData, match=r"the metric map fits no output.*labels are \[40\]") as error:
        choose_metric({"y": LOGITS}, CLASSES, "map")
    assert "boxes [samples, boxes, 6]" in (error.value.hint or "")
    with pytest.raises(InvalidData, match="the metric auc needs labels"):
        choose_metric({"y": LOGITS}, None, "auc")


@pytest.mark.parametrize("metric", ["", "top-1", "f1", "auc"])
def test_the_label_that_does_not_fit_is_named_with_the_rule_and_the_way_out(metric: str) -> None:
    with pytest.raises(
        InvalidData, match=r"label 5 at index 4 is too high: output 'y' has 5 classes, .* 0 to 4"
    ) as error:
        choose_metric({"y": LOGITS}, CLASSES + 1, metric)
    assert (error.value.hint or "").startswith("subtract 1 from every label; or ")
    padded = np.where(CLASSES == 3, -1, CLASSES)
    with pytest.raises(
        InvalidData, match="label -1 at index 3 is negative: class numbers start at 0, and only"
    ) as error:
        choose_metric({"y": LOGITS}, padded, metric)
    assert (error.value.hint or "").startswith("remove the samples with padding; or ")


def test_padding_of_positions_is_named_by_sample_and_position() -> None:
    labels = np.zeros((40, 3), int)
    labels[2, 1] = -100
    with pytest.raises(
        InvalidData, match=r"label -100 at index \[2, 1\] is negative.*only the metrics iou and perplexity skip"
    ):
        choose_metric({"y": np.zeros((40, 5, 3), np.float32)}, labels, "top-1")
    tokens = np.full((40, 3), 5)
    with pytest.raises(InvalidData, match=r"label 5 at index \[0, 0\] is too high: output 'y' has 5 classes"):
        choose_metric({"y": np.zeros((40, 3, 5), np.float32)}, tokens, "perplexity")


def test_an_output_is_named() -> None:
    answers = {"a": LOGITS, "b": LOGITS}
    assert choose_metric(answers, CLASSES, "top-1", "b").outputs == ("b",)
    assert choose_metric(answers, None, "", "b").outputs == ("b",)
    with pytest.raises(InvalidArgument, match="no output 'c'"):
        choose_metric(answers, None, "", "c")


def test_names_and_sums_tell_class_scores() -> None:
    assert has_class_scores("class_logits", LOGITS, {})
    assert has_class_scores("y", PROBABILITIES, {})
    assert not has_class_scores("y", LOGITS, {})
    assert not has_class_scores("logits", LOGITS[:, :1], {})


@pytest.mark.parametrize("name", ["probs", "class_scores"])
def test_probabilities_of_independent_labels_are_not_judged_by_the_highest(name: str) -> None:
    rates = special.expit(LOGITS)
    assert not has_class_scores(name, rates, {})
    assert choose_metric({name: rates}, None).metric.name == "fidelity"
    assert choose_metric({name: rates}, None, "agreement").metric.name == "agreement"
    for odd in (-0.1, 1.1):
        assert has_class_scores(name, np.where(np.arange(40)[:, None] == 7, odd, rates), {})


def test_scores_are_no_embedding() -> None:
    rates = special.expit(4 * WIDE - 8)
    assert choose_metric({"y": rates}, None).metric.name == "cosine"
    assert choose_metric({"probs": rates}, None).metric.name == "fidelity"
    assert choose_metric({"boxes": WIDE[:, :, None], "scores": WIDE}, None).metric.name == "fidelity"


def test_agreement_is_of_class_outputs_only() -> None:
    hidden = WIDE[:, :, None].repeat(2, axis=2)
    assert choose_metric({"hidden": hidden, "logits": LOGITS}, None, "agreement").outputs == ("logits",)
    assert choose_metric({"y": LOGITS, "label": CLASSES}, None, "agreement").outputs == ("label",)
    assert choose_metric({"y": LOGITS, "z": LOGITS}, None, "agreement").outputs == ("y",)
    assert choose_metric({"y": LOGITS, "z": LOGITS}, None, "fidelity").outputs == ("y", "z")


@pytest.mark.parametrize(("columns", "metric"), [(64, "cosine"), (63, "fidelity")])
def test_wide_centred_rows_are_embeddings(columns: int, metric: str) -> None:
    rows = 3 * RNG(1).normal(size=(400, columns))
    assert choose_metric({"y": rows}, None).metric.name == metric


@pytest.mark.parametrize(("share", "metric"), [(0.45, "cosine"), (0.55, "fidelity")])
def test_an_embedding_has_at_most_half_of_its_square_in_the_mean_row(share: float, metric: str) -> None:
    rows = RNG(1).normal(size=(500, 100))
    rows -= rows.mean(axis=0)
    square = (rows**2).sum(axis=1).mean()
    offset = np.zeros(100)
    offset[3] = (square * share / (1 - share)) ** 0.5
    assert choose_metric({"y": rows + offset}, None).metric.name == metric


@pytest.mark.parametrize(("error", "is_scores"), [(0.9e-3, True), (1.2e-3, False)])
def test_probabilities_sum_to_one_within_a_thousandth(error: float, is_scores: bool) -> None:
    rows = PROBABILITIES * np.where(np.arange(40) == 7, 1 + error, 1)[:, None]
    assert has_class_scores("y", rows, {}) is is_scores
    unit = UNIT * np.where(np.arange(40) == 7, (1 + error) ** 0.5, 1)[:, None]
    assert choose_metric({"y": unit}, None).metric.name == ("cosine" if is_scores else "fidelity")


def test_negative_numbers_are_no_probabilities() -> None:
    assert not has_class_scores("y", np.array([[1.5, -0.5], [0.5, 0.5]]), {})
    assert has_class_scores("y", np.array([[1.0, 0.0], [0.5, 0.5]]), {})


@pytest.mark.parametrize("name", ["logits", "probabilities", "SOFTMAX", "class", "scores", "categories"])
def test_scores_beside_boxes_are_not_certainly_of_classes(name: str) -> None:
    assert has_class_scores(name, LOGITS, {name: LOGITS})
    assert not has_class_scores(name, LOGITS, {"detection_boxes": LOGITS, name: LOGITS})
    assert not has_class_scores(name, LOGITS[:, :, None], {})
    assert not has_class_scores(name, CLASSES, {})


@pytest.mark.parametrize(("labels", "fits"), [(CLASSES, True), (CLASSES + 1, False)])
def test_class_numbers_are_below_the_number_of_columns(labels: np.ndarray, fits: bool) -> None:
    answers = {"wide": WIDE[:, :, None], "integers": LOGITS.astype(int), "y": LOGITS}
    if fits:
        assert scored_output(answers, labels) == "y"
    else:
        with pytest.raises(InvalidData):
            scored_output(answers, labels)


def test_one_column_has_no_scores_even_of_one_class() -> None:
    with pytest.raises(InvalidData):
        scored_output({"y": LOGITS[:, :1]}, np.zeros(40, int))
    assert scored_output({"y": LOGITS[:, :2]}, np.zeros(0, int)) == "y"


def test_binary_labels_of_one_score_are_no_regression() -> None:
    answers = {"y": LOGITS[:, 0]}
    assert choose_metric(answers, CLASSES * 3).metric.name == "r2"
    assert choose_metric(answers, CLASSES % 2).metric.name != "r2"


def test_integers_of_one_number_per_sample_are_classes() -> None:
    assert choose_metric({"ids": CLASSES, "y": LOGITS}, None).outputs == ("ids",)
    assert choose_metric({"ids": CLASSES[:, None], "y": LOGITS}, None).outputs == ("ids",)
    assert choose_metric({"ids": np.stack([CLASSES, CLASSES], 1), "y": LOGITS}, None).outputs == ("ids", "y")


def test_a_metric_without_labels_ignores_them() -> None:
    assert choose_metric({"y": LOGITS}, LOGITS[:, :3], "agreement").metric.name == "agreement"
    assert choose_metric({"y": LOGITS}, None, "top-5").outputs == ("y",)


def test_integers_are_no_scores_whatever_their_name() -> None:
    assert has_class_scores("logits", LOGITS, {})
    assert not has_class_scores("logits", LOGITS.astype(np.int64), {})


def test_a_function_without_labels_is_not_asked_for_them() -> None:
    assert choose_metric({"y": LOGITS}, None, "math:fsum").outputs == ("y",)


@pytest.mark.parametrize("classes", [2, 3])
def test_bits_are_no_numbers_to_regress(classes: int) -> None:
    """Numbers of two classes are labels of a classifier, for which no output is fit here."""
    output = {"y": WIDE[:, None, :3]}
    labels = np.arange(120).reshape(40, 1, 3) % classes
    assert choose_metric(output, labels / 4).metric.name == "r2"
    if classes == 3:
        assert choose_metric(output, labels).metric.name == "r2"
    else:
        with pytest.raises(InvalidData, match="no output suits the labels"):
            choose_metric(output, labels)
