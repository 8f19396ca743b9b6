"""Random pipelines on random inputs: all ways to run them in this process give the same bits and errors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from random import Random

from penstock.pipeline.streaming.step_process import StepProcess
from pipeline_ways import check_ways, draw
from tests.fuzz.mutator import Seed
from tests.fuzz.target import Target


class PipelineAnswersTarget(Target):
    """A message is the seed of a pipeline and its inputs."""

    seeds: Sequence[Seed] = [(bytes([number]), b"-pipeline") for number in range(16)]
    growth_factor = peak_factor = (
        8  # the libraries import modules and keep memory on demand, and a list may have hundreds of arrays
    )
    slice_runs = 20

    def __init__(self) -> None:
        logging.getLogger("penstock").addHandler(logging.NullHandler())
        self._process = StepProcess()
        self._process.wait()
        for seed in self.seeds[:2]:
            self.run(b"".join(seed))

    def run(self, data: bytes) -> None:
        random = Random(data)
        case = draw(random, count=3)
        try:
            check_ways(case, random, self._process)
        except Exception as error:
            raise type(error)(f"{error}\n{case.data}") from error

    def close(self) -> None:
        self._process.close()
