"""What a reader of the figures should know about the data behind them."""

from __future__ import annotations

import numpy as np

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy
from penstock.errors import PenstockError
from penstock.offline.compress.ptq.drift import find_drift, shift_warnings
from penstock.offline.dataset import Dataset
from penstock.offline.judge.accuracy import make_reference
from penstock.offline.judge.metrics import samples_needed
from penstock.offline.sessions import loaded

_REACHABLE = 20
"""Times the samples there are that it makes sense to ask for; a loss close to the bound takes any number."""
_ROWS = 512
"""Samples of each that are compared, evenly spaced."""
_BYTES = 64 << 20
"""And what they may take."""


def too_few(samples: int, metric: str, max_loss: float, what: str) -> tuple[str, ...]:
    """A note if no result on ``samples``, called ``what``, can prove a loss within ``max_loss``, with how many could. Pure.

    None for fidelity, which does not count hits, and where no loss is allowed, which no number of samples proves.
    """
    if metric == "fidelity" or max_loss <= 0:
        return ()
    likely, least = samples_needed(max_loss), samples_needed(max_loss, changed=0.0)
    if likely is None or least is None or samples >= least:
        return ()
    note = (
        f"{samples} {what} samples are too few to decide on a loss of {max_loss:.2%}: give at least {least}, which prove it if "
        f"no answer changes, better {likely}, which do if 2 % change; until then losses are estimates"
    )
    return (note,)


def unproved(accuracy: Accuracy, max_loss: float) -> tuple[str, ...]:
    """A note if ``accuracy`` is within ``max_loss``, but that is not proved, with how many samples would do. Pure."""
    loss = accuracy.loss
    if accuracy.metric == "fidelity" or max_loss <= 0 or loss.high <= max_loss or loss.value > max_loss:
        return ()
    enough = samples_needed(max_loss, max(0.0, loss.value))
    is_reachable = enough is not None and enough <= _REACHABLE * accuracy.samples
    advice = f"; about {enough} samples would do if the estimate is right" if is_reachable else ""
    note = (
        f"that no more than {max_loss:.2%} is lost is an estimate on {accuracy.samples} samples, not proved: with 95 % "
        f"confidence it may be up to {loss.high:.2%}{advice}"
    )
    return (note,)


def about(
    artifact: Artifact, fitted: Dataset | None, judged: Dataset, max_loss: float, multiple: int = 1
) -> tuple[str, ...]:
    """All that can be said before the work: too few samples ``judged``, or unlike those ``fitted``.

    ``artifact`` is the FP32 model, which takes ``multiple`` samples at a time. None where it does not run on them.
    """
    try:
        with loaded(artifact) as model:
            metric = make_reference(model.forward(judged.rows(0, multiple)), judged.labels).metric
    except PenstockError:
        return ()
    few = too_few(judged.count, metric, max_loss, "evaluation")
    return few if fitted is None or fitted.digest == judged.digest else few + unlike(artifact, fitted, judged, multiple)


def unlike(artifact: Artifact, fitted: Dataset, judged: Dataset, multiple: int = 1) -> tuple[str, ...]:
    """Notes, with the evidence, on what in ``judged`` is distributed otherwise than in ``fitted``, as FP32 ``artifact`` sees it.

    ``multiple`` is how many samples the model takes at a time. None where it cannot be told.
    """
    try:
        found = find_drift(artifact, _some(fitted, multiple), _some(judged, multiple))
    except PenstockError:
        return ()
    return tuple(shift_warnings(found))


def _some(data: Dataset, multiple: int) -> Dataset:
    row_bytes = sum(array.nbytes for array in data.inputs.values()) / data.count
    most = min(_ROWS, int(_BYTES / max(1.0, row_bytes)), data.count)
    count = max(1, most // multiple) * multiple
    return data.pick(np.linspace(0, data.count - 1, count).round().astype(np.intp))
