"""Candidates judged on data that nothing was fitted on, against the original's answers, which are computed once."""

from __future__ import annotations

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import InvalidData
from penstock.offline.compress.precision.trials import divergence
from penstock.offline.dataset import Dataset
from penstock.offline.tune.accuracy import Judge, Outputs, answers, make_judge


class HeldOut:
    """The judge of one original on ``data``.

    Raises InvalidModel if the original does not load; InvalidData if the labels fit no output, or no sample is there.
    """

    def __init__(self, original: Artifact, data: Dataset, threads: int = 1) -> None:
        if data.count == 0:
            raise InvalidData("there are no samples to judge on", "give some, which training does not see")
        self.data, self.threads = data, threads
        self.judge: Judge = make_judge(self._answers(original), data.labels)
        self.original = self.judge.original()

    def assess(self, candidate: Artifact) -> tuple[Accuracy, float]:
        """The accuracy of ``candidate``, and its mean divergence from the original's answers, which moves smoothly."""
        outputs = self._answers(candidate)
        return self.judge.compare(outputs), float(divergence(self.judge, outputs).mean())

    def _answers(self, artifact: Artifact) -> Outputs:
        loaded: LoadedModel = get_engine("onnxruntime").load(artifact, {"threads": self.threads})
        try:
            return answers(loaded, self.data)
        finally:
            loaded.unload()


def split(artifact: Artifact, data: Dataset, share: float = 0.2) -> tuple[Dataset, Dataset]:
    """``data`` but for its last ``share``, and that, in multiples of the batch that ``artifact`` wants. Raises InvalidData."""
    loaded: LoadedModel = get_engine("onnxruntime").load(artifact, {"threads": 1})
    multiple = loaded.signature.smallest_batch
    loaded.unload()
    return data.split(share, multiple)
