"""Bits per layer by sensitivity: the fewest that keep the model's answers within bounds while all other layers stay unchanged."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy
from penstock.dataset import Dataset
from penstock.errors import InvalidConfig
from penstock.offline.compress.sharing.layers import find_layers
from penstock.offline.compress.sharing.share import MAX_BITS, ShareOptions, share_only
from penstock.offline.judge.judge import Judge
from penstock.offline.optimize.model import load_model


class BitsOptions(msgspec.Struct, frozen=True):
    """The error and the loss allowed for one layer."""

    max_relative_error: float = 0.02
    """Of the worst output, with this layer alone shared. Errors of layers add up as squares, if they are independent."""
    max_accuracy_loss: float = 0.001
    """Of the metric that the data allow."""
    least: int = 2
    most: int = 8
    threads: int = 1

    def check(self) -> None:
        """Raises InvalidConfig for bounds that contradict each other."""
        if not 1 <= self.least <= self.most <= MAX_BITS or self.max_relative_error < 0 or self.threads < 0:
            raise InvalidConfig(f"{self} cannot be", f"1 <= least <= most <= {MAX_BITS}, and no negative bounds")

    def holds(self, accuracy: Accuracy) -> bool:
        """Whether a model that answers like this is good enough."""
        return accuracy.relative_error <= self.max_relative_error and accuracy.loss.value <= self.max_accuracy_loss


def choose_bits(
    artifact: Artifact,
    data: Dataset,
    options: BitsOptions | None = None,
    share_options: ShareOptions | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ShareOptions:
    """``share_options`` with the bits of each weight: the fewest that keep the bounds on ``data``, ``most`` where none does.

    Found by bisection, as fewer bits hardly ever answer better: some three runs over ``data`` a layer. Raises as ``share``, and
    InvalidData if labels fit no output.
    """
    options = options or BitsOptions()
    options.check()
    base = share_options or ShareOptions()
    judge = Judge(artifact, data, options.threads)
    layers = find_layers(load_model(artifact), frozenset(base.bits))
    names = [name for name, layer in layers.items() if layer.kind != "bias" and name not in base.bits]

    def good(name: str, bits: int) -> bool:
        return options.holds(judge.assess(share_only(artifact, name, bits)).accuracy)

    chosen = dict(base.bits)
    for done, name in enumerate(names):
        low, high = options.least, options.most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if good(name, middle) else (middle + 1, high)
        chosen[name] = low
        on_progress(done + 1, len(names))
    return msgspec.structs.replace(base, bits=chosen)
