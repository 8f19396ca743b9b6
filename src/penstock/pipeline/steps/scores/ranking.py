"""The best classes: top-k, threshold, argmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import Step, wrong_type
from penstock.pipeline.steps.scores.labels import (
    Labelled,
    Labels,
    check_labels,
    class_count,
    comparable,
    names_of,
    score_type,
    scores_of,
)
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array, DataType

_LABEL = ValueType(media=Media.TEXT, datatype=DataType.BYTES)
_LABEL_LIST = msgspec.structs.replace(_LABEL, many=True)


class _Ranking(Labelled, frozen=True, kw_only=True):
    outputs: ClassVar[tuple[str, ...]] = ("labels", "scores", "indices")

    labels: Labels = ""
    """Names of the classes: one of the pipeline's lists, or a list. Without, the labels are the classes' numbers."""

    def _checked(self, name: str, given: ValueType, count: int) -> dict[str, ValueType]:
        classes = class_count(name, given)
        check_labels(name, self.labels, classes)
        indices = ValueType(datatype=DataType.INT64, shape=(count,))
        labels = msgspec.structs.replace(_LABEL_LIST, count=count)
        return {"labels": labels, "scores": score_type(given.datatype, (count,)), "indices": indices}

    def _chosen(self, scores: Array, indices: Array) -> dict[str, Value]:
        return {"labels": names_of(indices, self.labels), "scores": scores[indices], "indices": indices}


class TopK(_Ranking, frozen=True, kw_only=True):
    """Select the ``k`` best classes, best first. Of equal scores, the lower class comes first. NaN is an error."""

    k: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Number of classes. With fewer classes than this, all are selected."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Types of ``k`` classes. Raises InvalidConfig if the input has several dimensions, or the number of labels differs."""
        classes = class_count("top_k", inputs["value"])
        return self._checked("top_k", inputs["value"], -1 if classes == -1 else min(self.k, classes))

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """Labels, scores and numbers of the best classes."""
        scores = scores_of(inputs["value"], self.labels)
        return self._chosen(scores, _best(scores, self.k))


class Threshold(_Ranking, frozen=True, kw_only=True):
    """Select the classes whose score is at least ``at``, best first. Of equal scores, the lower class comes first. NaN is an error."""

    at: float
    """Lowest score that is selected."""

    def __post_init__(self) -> None:
        if not np.isfinite(self.at):
            raise InvalidConfig(f"step 'threshold' has 'at: {self.at}', which is not a finite number")

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Types of any number of classes. Raises InvalidConfig if the input has several dimensions, or other labels than classes."""
        return self._checked("threshold", inputs["value"], -1)

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """Labels, scores and numbers of the selected classes."""
        scores = scores_of(inputs["value"], self.labels)
        candidates = np.flatnonzero(scores >= self.at)
        return self._chosen(scores, candidates[descending(scores[candidates])])


_SORTED = 256
"""Number of scores up to which all are sorted."""
_SCANNED = 10
"""Number of best scores up to which each is searched for, instead of being separated from the others and sorted."""


def _best(scores: Array, k: int) -> Array:
    """The order of the ``k`` highest of ``scores``."""
    if scores.size <= max(k, _SORTED):
        return descending(scores)[:k]
    if k > _SCANNED:
        candidates = np.flatnonzero(scores >= np.partition(scores, scores.size - k)[scores.size - k])
        return candidates[descending(scores[candidates])][:k]
    lowest = -math.inf if scores.dtype.kind == "f" else scores.min().item()
    left, found = scores.copy(), np.empty(k, np.int64)
    for place in range(k):
        best = int(left.argmax())
        if left.item(best) == lowest:  # all others have this score
            found[place:] = np.flatnonzero(scores == lowest)[: k - place]
            break
        found[place] = best
        left[best] = lowest
    return found


def descending(scores: Array) -> Array:
    """The order of ``scores`` from the highest to the lowest. Equal scores keep their order."""
    if scores.dtype.kind == "f":
        return (-scores).argsort(kind="stable")
    order: Array = scores[::-1].argsort(kind="stable")[::-1]
    return scores.size - 1 - order


class Argmax(Step, frozen=True, kw_only=True):
    """Find the class with the highest score along an axis, such as the class of each time step or pixel.

    Of equal scores, the lower class is found. NaN is an error.
    """

    axis: int = -1
    """Axis of the classes."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """INT64 without the axis of the classes. Raises InvalidConfig unless the input is an array that has this axis."""
        given = inputs["value"]
        rank = len(given.shape)
        if given.many or given.datatype is DataType.BYTES or not -rank <= self.axis < rank:
            raise wrong_type("argmax", "value", f"an array with axis {self.axis}", given)
        axis = self.axis % rank
        return {"value": ValueType(datatype=DataType.INT64, shape=given.shape[:axis] + given.shape[axis + 1 :])}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The numbers of the classes."""
        scores = comparable(inputs["value"])
        if not scores.shape[self.axis]:
            raise InvalidInput("'value' has no classes")
        return {"value": scores.argmax(axis=self.axis)}


class Label(Labelled, frozen=True, kw_only=True):
    """Name classes: a list of labels for INT64 [n], such as the classes of boxes, or one label for INT64 [], such as that of
    ``argmax``.
    """

    inputs: ClassVar[tuple[str, ...]] = ("classes",)
    outputs: ClassVar[tuple[str, ...]] = ("labels",)

    labels: Labels
    """Names of the classes: one of the pipeline's lists, or a list."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """A list of text, or a text. Raises InvalidConfig unless the input is INT64 [n] or INT64 []."""
        given = inputs["classes"]
        if given.many or given.datatype is not DataType.INT64 or len(given.shape) > 1:
            raise wrong_type("label", "classes", "INT64 [n] or INT64 []", given)
        return {"labels": _LABEL_LIST if given.shape else _LABEL}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The names. Raises InvalidInput for a class without a name."""
        given = np.asarray(inputs["classes"])
        classes: Array = np.atleast_1d(given)
        wrong = classes[(classes < 0) | (classes >= len(self.labels))]
        if wrong.size:
            raise InvalidInput(f"there is no label for class {wrong[0]}: 'labels' has {len(self.labels)} names")
        names = names_of(classes, self.labels)
        return {"labels": names if given.ndim else names[0]}
