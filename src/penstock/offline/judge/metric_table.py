"""All metrics by name, and the user's own functions as metrics."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout

from penstock.errors import InvalidArgument, PenstockError
from penstock.offline.judge.metric import AccuracyMetric, Function
from penstock.offline.judge.scoring import boxes, classes, embeddings, numbers, texts
from penstock.tensor import Array

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
    return AccuracyMetric(name, _found(module, function), "any", lambda *_: True, kind="other")


def _found(module: str, function: str) -> Function:
    here = ""
    try:
        # Files that are written later must not move if the module or the function changes the working directory.
        with chdir("."), _apart_from_output():
            here = os.getcwd()
            sys.path.insert(0, here)
            found = getattr(importlib.import_module(module), function)
    except (PenstockError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - the user's module may raise SystemExit
        raise InvalidArgument(
            f"cannot load the metric '{module}:{function}': {type(error).__name__}: {error}",
            "give a module that Python can import, and a function of this module",
        ) from None
    finally:
        if here in sys.path:
            sys.path.remove(here)
    if not callable(found):
        raise InvalidArgument(f"the metric '{module}:{function}' is not a function", "name a function of the module")

    def of(output: Array, labels: Array) -> Array | float:
        with chdir("."), _apart_from_output():
            return found(output, labels)  # type: ignore[no-any-return]

    return of


@contextmanager
def _apart_from_output() -> Iterator[None]:
    """Standard output stays open, and receives nothing: what the user's code prints goes to standard error."""
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with open(os.dup(2), "w") as printed, redirect_stdout(printed):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
