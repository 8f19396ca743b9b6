"""Decode the scores of text recognition: connectionist temporal classification [A. Graves et al., ICML 2006]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import wrong_type
from penstock.pipeline.steps.scores.activations import softmax
from penstock.pipeline.steps.scores.labels import Labelled, Labels, check_probabilities, comparable
from penstock.pipeline.value import TEXT, Value, ValueType
from penstock.tensor import Array, DataType

_LEAST = 1e-4
"""A class whose probability in a time step is lower does not extend a beam."""


class CtcDecode(Labelled, frozen=True, kw_only=True):
    """Decode probabilities [time, classes] to text: classes that repeat are merged, and then blanks are removed.

    - Greedy (``beam: 1``): the best class of each time step. ``score`` is the mean probability of the characters, or 0 without any.
    - Beam search: of the texts that are followed, the one whose alignments have the highest total probability, which is ``score``.
    """

    outputs: ClassVar[tuple[str, ...]] = ("text", "score")
    holds_lock: ClassVar[bool] = True

    labels: Labels
    """Characters of the classes, without the blank: one of the pipeline's lists, or a list."""
    blank: int = 0
    """Class of the blank. -1 is the last class."""
    softmax: bool = False
    """Set if the input contains logits, or the logarithms of probabilities. Otherwise, a number that is no probability is an error."""
    beam: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """Number of texts that are followed. 1 is greedy decoding."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """A text and a number. Raises InvalidConfig if the input has another shape, or the number of characters differs."""
        given = inputs["value"]
        if given.many or not given.datatype.is_float or len(given.shape) != 2:
            raise wrong_type("ctc_decode", "value", "probabilities [time, classes]", given)
        classes = given.shape[1]
        if isinstance(self.labels, tuple) and classes not in (-1, len(self.labels) + 1):
            raise InvalidConfig(
                f"step 'ctc_decode' has {len(self.labels)} labels and a blank, but there are {classes} classes"
            )
        return {"text": TEXT, "score": ValueType(datatype=DataType.FP32, shape=())}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The text and its score."""
        scores = comparable(inputs["value"])
        if scores.ndim != 2 or scores.shape[1] != len(self.labels) + 1:
            raise InvalidInput(
                f"'value' has the shape {list(scores.shape)}, not [time, {len(self.labels) + 1}]",
                "'labels' must contain every character except the blank",
            )
        blank = self.blank % scores.shape[1]
        if self.softmax:
            scores = comparable(softmax(scores))
        else:
            check_probabilities(scores, "value", "set 'softmax: true' if these are logits, or their logarithms")
        classes, score = _greedy(scores, blank) if self.beam == 1 else _searched(scores, blank, self.beam)
        text = "".join(self.labels[index - (index > blank)] for index in classes)
        return {"text": text, "score": np.array(score, np.float32)}


def _greedy(scores: Array, blank: int) -> tuple[list[int], float]:
    best = scores.argmax(axis=1)
    kept = best != blank
    kept[1:] &= best[1:] != best[:-1]
    if not kept.any():
        return [], 0.0
    return best[kept].tolist(), float(scores.max(axis=1)[kept].mean())


def _searched(scores: Array, blank: int, width: int) -> tuple[tuple[int, ...], float]:
    """Prefix beam search [A. Hannun et al., "First-pass large vocabulary continuous speech recognition", 2014]."""
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 0.0)}
    """For each text, the probability of its alignments that end in a blank, and of those that end in its last class."""
    for row in scores.astype(np.float64):
        found: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
        likely = [(index, row[index]) for index in np.flatnonzero(row >= _LEAST).tolist() if index != blank]
        for text, (ending, repeating) in beams.items():
            found[text][0] += (ending + repeating) * row[blank]
            if text:
                found[text][1] += repeating * row[text[-1]]
            for index, probability in likely:
                last = text and text[-1] == index
                found[*text, index][1] += (ending if last else ending + repeating) * probability
        ordered = sorted(found.items(), key=lambda item: (-sum(item[1]), item[0]))
        beams = {text: (one, two) for text, (one, two) in ordered[:width]}
    best = max(beams, key=lambda text: sum(beams[text]))
    return best, float(sum(beams[best]))
