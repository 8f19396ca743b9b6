"""The terms of the loss, compared with their formulas, and students that learn their teacher's outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from networks import Network, cnn, mlp
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidArgument, InvalidConfig, InvalidData, Unsupported
from penstock.offline.compress.training.distill import DistillationLoss, DistillOptions, OutputKind, distill, recover
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.teacher import Teacher
from penstock.offline.compress.training.trainable import TrainableModel

RNG = np.random.default_rng(11)
X = RNG.normal(size=(64, 16)).astype(np.float32)
LABELS = RNG.integers(0, 4, 64)


def two_layers(width: int, seed: int = 0, finish: Callable[[Network, str], Any] | None = None) -> Artifact:
    """x (N, 16) to y (N, 4): one hidden layer, called "hidden"."""
    n = Network(seed)
    hidden = n.op("Relu", n.gemm("x", 16, width), name="hidden")
    if finish is None:
        n.gemm(hidden, width, 4, name="y")
    else:
        finish(n, n.gemm(hidden, width, 4, name="logits"))
    return n.artifact({"x": ["N", 16]}, {"y": ["N", 4]})


def softmax(n: Network, logits: str) -> None:
    n.op("Softmax", logits, name="y", axis=-1)


def data(labels: bool = False) -> Dataset:
    return make_dataset({"x": X}, LABELS if labels else None)


def softened(z: np.ndarray, temperature: float) -> np.ndarray:
    e = np.exp(z / temperature - (z / temperature).max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def divergence(teacher: np.ndarray, student: np.ndarray, temperature: float) -> float:
    """T² KL, averaged over rows, as a plain loop."""
    total = 0.0
    for p, q in zip(softened(teacher, temperature), softened(student, temperature), strict=True):
        total += sum(float(a * np.log(a / b)) for a, b in zip(p, q, strict=True))
    return temperature**2 * total / len(teacher)


def loss_of(student: Artifact, teacher: Artifact, labels: bool, **options: Any) -> tuple[float, DistillationLoss, Any]:
    known = Teacher(teacher, data())
    loss = DistillationLoss(student, known, LABELS if labels else None, DistillOptions(**options))
    tensors = TrainableModel(student)({"x": torch.tensor(X)}, list(loss.logits.values()))
    value = float(loss(tensors, torch.arange(64)).detach())
    return value, loss, (known.answers["y"].astype(np.float64), tensors)


def test_with_labels_it_is_the_formula_of_hinton() -> None:
    value, loss, (z, tensors) = loss_of(two_layers(8, 1), mlp(), True, temperature=3.0, teacher_share=0.6)
    given = tensors["y"].detach().numpy().astype(np.float64)
    cross_entropy = -np.log(softened(given, 1.0)[np.arange(64), LABELS]).mean()
    assert loss.kinds == {"y": OutputKind.LOGITS}
    assert value == pytest.approx(0.4 * cross_entropy + 0.6 * divergence(z, given, 3.0), rel=1e-5)


def test_without_labels_it_is_the_divergence_and_the_squares() -> None:
    value, loss, (z, tensors) = loss_of(two_layers(8, 1), mlp(), False)
    given = tensors["y"].detach().numpy().astype(np.float64)
    squares = ((given - z) ** 2).mean() / z.var(axis=0).mean()
    assert loss.kinds == {"y": OutputKind.EITHER}
    assert value == pytest.approx(divergence(z, given, 4.0) + squares, rel=1e-5)


@pytest.mark.parametrize("labels", [False, True])
def test_probabilities_are_softened_by_their_logarithms(labels: bool) -> None:
    """A softmax's input and the logarithm of its result differ by a constant per row, which does not affect the divergence."""
    student, teacher = two_layers(8, 1, softmax), two_layers(16, 2, softmax)
    value, loss, (p, tensors) = loss_of(student, teacher, labels)
    given = np.log(tensors["y"].detach().numpy().astype(np.float64))
    expected = divergence(np.log(p), given, 4.0)
    if labels:
        expected = 0.7 * expected - 0.3 * given[np.arange(64), LABELS].mean()
    assert loss.kinds == {"y": OutputKind.PROBABILITIES}
    assert loss.logits == {"y": "logits"}
    assert value == pytest.approx(expected, rel=1e-4)


def test_probabilities_of_nothing_give_finite_gradients() -> None:
    """Logits of a thousand: all but one probability are 0 in FP32."""

    def sharp(n: Network, logits: str) -> None:
        n.op("Softmax", n.op("Mul", logits, n.weight(np.float32([1e3]))), name="y", axis=-1)

    student = TrainableModel(two_layers(8, 1, sharp))
    report = recover(student, data(True), two_layers(8, 2, sharp), FitOptions(epochs=1, learning_rate=1e-5))
    assert np.isfinite(report.losses[-1][1])
    assert all(bool(torch.isfinite(weight).all()) for weight in student.weights.values())


def test_a_perfect_student_loses_nothing() -> None:
    value, _, _ = loss_of(mlp(), mlp(), False)
    assert value == pytest.approx(0.0, abs=1e-6)  # rounding of FP32 in torch and in ONNX Runtime


def test_values_count_in_units_of_their_variance_whatever_their_scale() -> None:
    def image(seed: int, factor: float) -> Artifact:
        n = Network(seed)
        y = n.op("Mul", n.gemm("x", 16, 12), n.weight(np.float32([factor])))
        n.op("Reshape", y, n.weight(np.array([-1, 3, 4], np.int64)), name="y")
        return n.artifact({"x": ["N", 16]}, {"y": ["N", 3, 4]})

    values = [loss_of(image(1, factor), image(2, factor), False)[0] for factor in (1e-3, 1.0, 1e3)]
    assert values == pytest.approx([values[1]] * 3, rel=1e-4)
    constant = loss_of(image(1, 0.0), image(2, 0.0), False)
    assert constant[1].kinds == {"y": OutputKind.VALUES}
    assert constant[0] == 0.0


def test_outputs_that_are_no_floats_are_left_out() -> None:
    def chosen(names: list[str]) -> Artifact:
        n = Network(0)
        n.op("ArgMax", n.gemm("x", 16, 4, name="y"), name="class", axis=1)
        artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 4]})
        proto = onnx.load_model_from_string(artifact.data)
        proto.graph.output.append(onnx.helper.make_tensor_value_info("class", onnx.TensorProto.INT64, ["N", 1]))
        kept = [value for value in proto.graph.output if value.name in names]
        del proto.graph.output[:]
        proto.graph.output.extend(kept)
        return Artifact.from_bytes(proto.SerializeToString())

    both = chosen(["y", "class"])
    assert DistillationLoss(both, Teacher(both, data()), None, DistillOptions()).kinds.keys() == {"y"}
    only = chosen(["class"])
    with pytest.raises(Unsupported, match="the model has no float output"):
        DistillationLoss(only, Teacher(only, data()), None, DistillOptions())


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("finish", [None, softmax])
def test_a_random_student_learns_to_agree(labels: bool, finish: Any) -> None:
    teacher, student = two_layers(24, 5, finish), two_layers(32, 6, finish)
    known = Teacher(teacher, data())
    labelled = make_dataset({"x": X}, known.answers["y"].argmax(axis=1) if labels else None)
    options = DistillOptions(fit=FitOptions(epochs=60, learning_rate=2e-2, batch_size=16))
    learned = distill(student, teacher, labelled, options)
    before, after = (Teacher(artifact, data()).answers["y"] for artifact in (student, learned))
    wanted = known.answers["y"].argmax(axis=1)
    assert (before.argmax(axis=1) == wanted).mean() < 0.6
    assert (after.argmax(axis=1) == wanted).mean() >= 0.9
    short = DistillOptions(fit=FitOptions(epochs=3, learning_rate=2e-2, batch_size=16))
    assert distill(student, teacher, labelled, short).data == distill(student, teacher, labelled, short).data
    step = learned.provenance[-1]
    assert (step.name, step.source_digest) == ("distill", student.digest)
    assert step.facts["teacher"] == teacher.digest
    assert step.facts["labels"] is labels


def test_hints_bring_hidden_tensors_together() -> None:
    """The part of the hint that the best linear map explains grows; the adaptor is not in the graph."""
    teacher, student = two_layers(24, 5), two_layers(12, 6)

    def explained(artifact: Artifact) -> float:
        ours, theirs = (Teacher(a, data(), also=["hidden"]).answers["hidden"] for a in (artifact, teacher))
        rest = theirs - ours @ np.linalg.lstsq(ours, theirs, rcond=None)[0]
        return 1 - float((rest**2).mean() / theirs.var(axis=0).mean())

    plain = DistillOptions(fit=FitOptions(epochs=40, learning_rate=1e-2, batch_size=16))
    hinted = DistillOptions(fit=plain.fit, hints={"hidden": "hidden"}, hint_weight=10.0)
    without, given = (distill(student, teacher, data(), options) for options in (plain, hinted))
    assert explained(given) > explained(without) + 0.05
    assert len(given.data) == len(student.data)


def test_hints_on_images_map_channels() -> None:
    rows = make_dataset({"x": RNG.normal(size=(8, 3, 12, 12)).astype(np.float32)}, None)
    options = DistillOptions(fit=FitOptions(epochs=1), hints={"stem": "stem"})
    distill(cnn(8), cnn(12), rows, options)
    with pytest.raises(InvalidArgument, match=r"hint 'stem' has shape \[8, 12, 12\].*\[10\]"):
        distill(cnn(8), cnn(12), rows, DistillOptions(fit=FitOptions(epochs=1), hints={"stem": "y"}))
    with pytest.raises(InvalidArgument, match=r"no tensor \['nothing'\]"):
        distill(cnn(8), cnn(12), rows, DistillOptions(hints={"stem": "nothing"}))
    with pytest.raises(InvalidArgument, match="nothing"):
        distill(cnn(8), cnn(12), rows, DistillOptions(hints={"nothing": "stem"}))


def test_recovery_brings_back_the_original_answers() -> None:
    model = TrainableModel(mlp())
    weights = [weight for weight in model.weights.values() if weight.ndim == 2]
    masks = [weight.abs() > weight.abs().median() for weight in weights]

    def mask() -> None:
        with torch.no_grad():
            for weight, keep in zip(weights, masks, strict=True):
                weight.mul_(keep)

    mask()
    report = recover(model, data(), mlp(), FitOptions(epochs=50, batch_size=16, learning_rate=3e-3), after_step=mask)
    assert report.losses[-1][1] < 0.1 * report.losses[0][1]
    assert all(bool((weight[~keep] == 0).all()) for weight, keep in zip(weights, masks, strict=True))


def test_augmentation_asks_the_teacher_live() -> None:
    """If augmentation sets all inputs to zero, there is a single output to learn, which no row of the data has."""
    model, teacher = TrainableModel(two_layers(12, 6)), two_layers(24, 5)
    options = FitOptions(epochs=60, batch_size=16, learning_rate=1e-2)
    recover(model, data(), teacher, options, augment=lambda x, _: {"x": np.zeros_like(x["x"])})
    zeros = make_dataset({"x": np.zeros((2, 16), np.float32)}, None)
    got = Teacher(model.to_artifact("x", {}, {}), zeros).answers["y"]
    np.testing.assert_allclose(got, Teacher(teacher, zeros).answers["y"], atol=0.02)


def test_a_teacher_is_asked_once_for_many_recoveries() -> None:
    known = Teacher(mlp(), data())
    reports = [recover(TrainableModel(two_layers(8)), data(), known, FitOptions(epochs=2)) for _ in range(2)]
    assert reports[0].losses == reports[1].losses


def test_a_checkpoint_knows_its_teacher(tmp_path: Path) -> None:
    path = tmp_path / "run.kept"
    recover(TrainableModel(two_layers(8)), data(), mlp(), FitOptions(epochs=1), checkpoint=path)
    with pytest.raises(InvalidArgument, match="other options, data or model"):
        recover(TrainableModel(two_layers(8)), data(), mlp(width=32), FitOptions(epochs=1), checkpoint=path)


def other(inputs: dict[str, list[Any]], name: str, outputs: int) -> Artifact:
    (given,) = inputs
    n = Network(0)
    n.op("Gemm", given, n.normal(inputs[given][1], outputs), name=name)
    return n.artifact(inputs, {name: ["N", outputs]})


@pytest.mark.parametrize(
    ("student", "message"),
    [
        (other({"z": ["N", 16]}, "y", 4), r"differ: inputs \['z'\] in the student, \['x'\] in the teacher"),
        (other({"x": ["N", 16]}, "w", 4), r"differ: outputs \['w'\] in the student, \['y'\] in the teacher"),
        (other({"x": ["N", 16]}, "y", 5), r"'y' is FP32 \[-1, 5\] in the student, FP32 \[-1, 4\] in the teacher"),
    ],
)
def test_students_of_other_inputs_or_outputs(student: Artifact, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        distill(student, mlp(), data())


def test_bad_labels_data_and_options() -> None:
    with pytest.raises(InvalidData, match="labels go up to 9"):
        recover(TrainableModel(mlp()), make_dataset({"x": X}, np.full(64, 9)), mlp(), FitOptions())
    broken = two_layers(8, 1, lambda n, logits: n.op("Log", logits, name="y"))
    with pytest.raises(InvalidData, match="the teacher's 'y' is NaN or infinite"):
        recover(TrainableModel(mlp()), data(), broken, FitOptions())
    for wrong in ({"temperature": 0.0}, {"teacher_share": 1.5}, {"hint_weight": -1.0}):
        with pytest.raises(InvalidConfig, match=next(iter(wrong))):
            distill(mlp(), mlp(), data(), DistillOptions(**wrong))
