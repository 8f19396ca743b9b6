"""All metrics by name, and the user's own functions as metrics."""

from __future__ import annotations

from penstock.errors import InvalidArgument
from penstock.offline.judge.metric import AccuracyMetric
from penstock.offline.judge.scoring import boxes, classes, embeddings, numbers, texts
from penstock.samples.user_code import load_function

METRICS: dict[str, AccuracyMetric] = {
    metric.name: metric for module in (classes, numbers, embeddings, texts, boxes) for metric in module.METRICS
}
"""Every metric by its name."""


def metric_named(name: str) -> AccuracyMetric:
    """The metric called ``name``, or the function ``module:function``. Raises InvalidArgument.

    A function takes the output to judge and the labels (None without labels), both as arrays with one row per sample. The function
    returns one score per row, or a number. A higher score must be better. The loss is the original's score minus the candidate's score
    (with one score per row: the difference of the means).
    """
    if name in METRICS:
        return METRICS[name]
    module, _, function = name.partition(":")
    if not module or not function:
        raise InvalidArgument(
            f"there is no metric '{name}'", f"use one of: {', '.join(METRICS)}; or your own function, module:function"
        )
    return AccuracyMetric(name, load_function(name, "metric"), "any", lambda *_: True, kind="other")
