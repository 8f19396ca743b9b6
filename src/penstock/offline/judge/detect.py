"""Choose the metric from the shapes and values of outputs and labels, unless the user names a metric.

Only outputs that are certainly class scores are judged by their highest element. In other outputs, the highest element is not a class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, InvalidData
from penstock.offline.judge.metric import AccuracyMetric
from penstock.offline.judge.metric_table import METRICS, metric_named
from penstock.offline.judge.scoring.classes import cut_of, is_float, is_ids, is_single
from penstock.tensor import Array

_SCORES = re.compile(r"logit|prob|softmax|class|score|categor", re.IGNORECASE)
_BOXES = re.compile(r"box|mask|anchor|detection", re.IGNORECASE)
_EMBEDDING = 64
"""Minimum number of columns of an output that counts as an embedding although its rows do not have norm 1."""
_CENTRED = 0.5
"""Maximum mean square of an embedding's mean row, as a fraction of the mean square of all rows."""
_LABEL_METRICS = ("top-1", "average-precision", "iou", "r2", "wer", "map")
"""Metrics that use labels, in the order in which they are tried."""


class Choice(msgspec.Struct, frozen=True):
    """A metric, the outputs that it judges, and the reason for the choice."""

    metric: AccuracyMetric
    outputs: tuple[str, ...]
    reason: str
    cut: float | None = None
    """The score above which a sample is of class 1; None unless the metric finds classes in an output with one score per sample."""

    def __str__(self) -> str:
        """The choice as text, for example ``output 'y' by top-1: as asked for``."""
        return f"output {_quoted(self.outputs)} by {self.metric.name}: {self.reason}"


def choose_metric(
    answers: Mapping[str, Array], labels: Array | None, name: str = "", output: str = "", cut: float | None = None
) -> Choice:
    """Choose the metric ``name`` for ``output``, with the ``cut`` between two classes. An argument that is empty or None is chosen to
    suit the original's outputs and the labels.

    Raises InvalidArgument for an unknown metric or output, InvalidData if the labels suit no output.
    """
    if output and output not in answers:
        raise InvalidArgument(f"the model has no output '{output}'", f"its outputs are {', '.join(answers)}")
    found = {output: answers[output]} if output else dict(answers)
    if name:
        choice = _named(metric_named(name), found, labels)
    else:
        choice = _from_answers(found, answers) if labels is None else _from_labels(found, labels)
    return _with_cut(choice, answers[choice.outputs[0]], cut)


def has_class_scores(name: str, array: Array, names: Mapping[str, Array]) -> bool:
    """True if an output certainly has class scores [samples, classes]: its rows are probabilities with sum 1, or its name is like
    "logits". Other numbers from 0 to 1 may be probabilities of independent labels, of which the highest is not the only answer.
    """
    if not is_float(array) or array.ndim != 2 or array.shape[1] < 2:
        return False
    if are_shares(array):
        return True
    is_named = bool(_SCORES.search(name)) and not any(_BOXES.search(other) for other in names)
    return is_named and not bool((array >= 0).all() and (array <= 1).all())


def scored_output(answers: Mapping[str, Array], labels: Array) -> str:
    """The first output with scores [samples, classes] for all classes in ``labels``, without more columns if there is one. Raises
    InvalidData if there is none.
    """
    least = max(1, labels.max(initial=0))
    found = [name for name, array in answers.items() if is_float(array) and array.ndim == 2 and array.shape[1] > least]
    if not found:
        raise _misfit(answers, labels)
    return min(found, key=lambda name: _has_spare_columns(answers[name], labels))


def are_shares(array: Array) -> bool:
    """True if the elements of every row are probabilities with sum 1."""
    rows = array.astype(np.float64)
    return bool((rows >= 0).all() and np.allclose(rows.sum(axis=1), 1, atol=1e-3))


def _with_cut(choice: Choice, output: Array, cut: float | None) -> Choice:
    """``choice`` with the cut, in its metric and in its reason, if the metric needs one."""
    metric = choice.metric
    if not metric.cuts or not is_single(output):
        return choice
    of: Callable[..., Array | float] = metric.of
    cause = ""
    if cut is None:
        cut = cut_of(output)
        cause = ", since all scores are from 0 to 1" if cut else ", since not all scores are from 0 to 1"
    return Choice(
        msgspec.structs.replace(metric, of=partial(of, cut=cut)),
        choice.outputs,
        f"{choice.reason}; scores above {cut:g} are class 1{cause}",
        cut,
    )


def _named(metric: AccuracyMetric, answers: Mapping[str, Array], labels: Array | None) -> Choice:
    if metric.labels and metric.truth is None and labels is None and metric.name in METRICS:
        raise InvalidData(
            f"the metric {metric.name} needs labels", f"add an array 'labels' to the evaluation data: {metric.shapes}"
        )
    given = labels if metric.labels else None
    fitting = _fitting(metric, answers, given)
    if not fitting:
        cause, fix = _bad_label(answers, given, axis=-1 if metric.name == "perplexity" else 1)
        raise InvalidData(
            f"the metric {metric.name} fits no output: {_shapes(answers, given)}{cause}",
            f"{fix}give what {metric.name} takes: {metric.shapes}",
        )
    chosen, reason = (fitting, "as asked for") if metric.name == "fidelity" else (fitting[:1], _first(fitting, answers))
    if metric.name == "agreement":
        chosen = [
            name for name in fitting if not is_float(answers[name]) or has_class_scores(name, answers[name], answers)
        ] or chosen
        reason = "as asked for"
    return Choice(metric, tuple(chosen), reason)


def _from_labels(answers: Mapping[str, Array], labels: Array) -> Choice:
    for metric in map(METRICS.__getitem__, _LABEL_METRICS):
        if metric.name == "r2" and is_ids(labels) and labels.max(initial=0) <= 1:
            continue
        if fitting := _fitting(metric, answers, labels):
            cause = f"there are labels, {list(labels.shape)} of type {labels.dtype}"
            return Choice(metric, (fitting[0],), _first(fitting, answers, cause))
    raise _misfit(answers, labels)


def _fitting(metric: AccuracyMetric, answers: Mapping[str, Array], labels: Array | None) -> list[str]:
    """The outputs that suit ``metric``, in the model's order. Outputs with more columns than the labels have classes come last: they
    may be features, which have a highest element too.
    """
    fitting = [name for name, array in answers.items() if metric.fits(array, labels)]
    if metric.kind != "classes" or labels is None or labels.ndim != 1 or not is_ids(labels):
        return fitting
    return sorted(fitting, key=lambda name: _has_spare_columns(answers[name], labels))


def _has_spare_columns(array: Array, labels: Array) -> bool:
    return is_float(array) and array.ndim == 2 and array.shape[1] > max(2, int(labels.max(initial=0)) + 1)


def _first(fitting: list[str], answers: Mapping[str, Array], cause: str = "as asked for") -> str:
    if len(answers) == 1:
        return cause
    is_moved = fitting[0] != next(name for name in answers if name in fitting)
    limit = " and has no more columns than the labels have classes" if is_moved else ""
    return f"{cause}, and '{fitting[0]}' is the first output that suits the metric{limit}"


def _from_answers(found: Mapping[str, Array], answers: Mapping[str, Array]) -> Choice:
    classes = [name for name, array in found.items() if has_class_scores(name, array, answers)]
    classes += [name for name, array in found.items() if is_ids(array) and array.size == len(array)]
    if classes:
        return Choice(METRICS["agreement"], tuple(classes), f"no labels; {_quoted(classes)} has classes")
    if not any(is_float(array) for array in found.values()):
        return Choice(METRICS["agreement"], tuple(found), "no labels; the outputs are integers or text")
    for name, array in found.items():
        if is_float(array) and array.ndim == 2 and array.shape[1] >= 2 and _is_embedding(name, array):
            return Choice(METRICS["cosine"], (name,), f"no labels; '{name}' looks like an embedding")
    return Choice(
        METRICS["fidelity"], tuple(found), "no labels; for a classifier add labels or name the metric agreement"
    )


def _misfit(answers: Mapping[str, Array], labels: Array) -> InvalidData:
    limit = f"labels go up to {labels.max()}, but " if is_ids(labels) else ""
    cause, fix = _bad_label(answers, labels)
    if labels.dtype.kind == "f" and (labels == np.floor(labels)).all():
        fix = "store class numbers as integers, labels.astype(numpy.int64); or "
    return InvalidData(
        f"{limit}no output suits the labels: {_shapes(answers, labels)}{cause}",
        f"{fix or 'check that class numbers start at 0; or '}name a metric; or remove the labels",
    )


def _bad_label(answers: Mapping[str, Array], labels: Array | None, axis: int = 1) -> tuple[str, str]:
    """The first label that is no class number, with the rule, and what to do, as parts of a message; empty if there is none.

    ``axis`` is the outputs' axis of classes.
    """
    if labels is None or not is_ids(labels) or not labels.size:
        return "", ""
    if labels.min() < 0:
        rule = "class numbers start at 0, and only the metrics iou and perplexity skip negative labels"
        fix = (
            "remove the samples with padding; or skip padding in a function of your own, --metric module:function; or "
        )
        return f"; {_place(labels, labels < 0)} is negative: {rule}", fix
    for name, array in answers.items():
        classes = array.shape[axis] if array.ndim > 1 and array.shape[axis] > 1 else 2
        if (
            is_float(array)
            and labels.size * (classes if array.ndim > 1 else 1) == array.size
            and labels.max() >= classes
        ):
            fix = "subtract 1 from every label; or " if labels.min() > 0 and labels.max() == classes else ""
            rule = f"output '{name}' has {classes} classes, numbered from 0 to {classes - 1}"
            return f"; {_place(labels, labels >= classes)} is too high: {rule}", fix
    return "", ""


def _place(labels: Array, where: Array) -> str:
    """The first label ``where`` is True, and its index."""
    first = np.argwhere(where)[0]
    return f"label {labels[tuple(first)]} at index {first[0] if len(first) == 1 else first.tolist()}"


def _is_embedding(name: str, array: Array) -> bool:
    if _SCORES.search(name):
        return False  # cosine would not see that all scores have another scale
    rows = array.astype(np.float64)
    squares = (rows**2).sum(axis=1)
    if np.allclose(squares, 1, atol=1e-3):
        return True
    return array.shape[1] >= _EMBEDDING and float((rows.mean(axis=0) ** 2).sum()) < _CENTRED * float(squares.mean())


def _shapes(answers: Mapping[str, Array], labels: Array | None) -> str:
    shapes = {name: list(array.shape) for name, array in answers.items()}
    return f"outputs are {shapes}" + (
        f", labels are {list(labels.shape)} of {labels.dtype}" if labels is not None else ""
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
