"""Choose each layer's bits by sensitivity: the fewest bits that keep the outputs within bounds if only this layer is clustered."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidConfig
from penstock.offline.compress.options import Count, NotNegative, Options
from penstock.offline.compress.sharing.layers import find_layers
from penstock.offline.compress.sharing.share import MAX_BITS, ShareOptions, share
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge
from penstock.offline.optimize.model import load_model

_Bits = Annotated[int, msgspec.Meta(ge=1, le=MAX_BITS)]


class BitsOptions(Options, frozen=True):
    """Maximum error and loss from sharing the weights of one layer."""

    max_relative_error: NotNegative = 0.02
    """Maximum relative error of the worst output. The squared errors of independent layers add up."""
    max_accuracy_loss: NotNegative = 0.001
    """Maximum decrease of the metric on the data."""
    least: _Bits = 2
    most: _Bits = 8
    threads: Count = 1


def choose_bits(
    artifact: Artifact,
    data: Dataset,
    options: BitsOptions | None = None,
    share_options: ShareOptions | None = None,
    on_progress: Progress = no_progress,
    contract: Contract = Contract(),  # noqa: B008 - immutable
) -> ShareOptions:
    """Return ``share_options`` with the fewest bits for each weight that satisfy the bounds on ``data``, or with ``most`` bits if none
    do. ``contract`` determines the metric.

    Bisection takes about three runs over ``data`` per layer. Raises InvalidData if labels fit no output, and the errors of
    ``share``.
    """
    options = options or BitsOptions()
    options.check()
    if options.least > options.most:
        raise InvalidConfig(f"least is {options.least}, but most is {options.most}", "give least <= most")
    base = share_options or ShareOptions()
    judge = Judge(artifact, data, options.threads, contract=contract)
    layers = find_layers(load_model(artifact), frozenset(base.bits))
    names = [name for name, layer in layers.items() if layer.kind != "bias" and name not in base.bits]
    chosen = dict(base.bits)
    for done, name in enumerate(names, 1):
        low, high = options.least, options.most
        while low < high:
            middle = (low + high) // 2
            accuracy = judge.assess(share(artifact, only(name, middle))).accuracy
            good = accuracy.relative_error <= options.max_relative_error
            # For the metric fidelity, the loss is a relative error of the outputs too.
            good = good and (judge.metric == "fidelity" or accuracy.loss.value <= options.max_accuracy_loss)
            low, high = (low, middle) if good else (middle + 1, high)
        chosen[name] = low
        on_progress(done, len(names))
    return msgspec.structs.replace(base, bits=chosen)


def only(name: str, bits: int) -> ShareOptions:
    """Options that cluster one tensor and leave all others unchanged."""
    return ShareOptions(conv_bits=0, fc_bits=0, bias_bits=0, bits={name: bits})
