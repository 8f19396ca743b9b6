"""Candidates judged on data that nothing was fitted on, against the original's answers, which are computed once."""

from __future__ import annotations

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy
from penstock.errors import InvalidData
from penstock.offline.compress.precision.trials import divergence
from penstock.offline.dataset import Dataset
from penstock.offline.judge.accuracy import Judge, make_judge
from penstock.offline.judge.sessions import answers_of, signature_of


class HeldOut:
    """The judge of one original on ``data``.

    Raises InvalidModel if the original does not load; InvalidData if the labels fit no output, or no sample is there.
    """

    def __init__(self, original: Artifact, data: Dataset, threads: int = 1) -> None:
        if data.count == 0:
            raise InvalidData("there are no samples to judge on", "give some, which training does not see")
        self.data, self.threads = data, threads
        self.judge: Judge = make_judge(answers_of(original, data, threads), data.labels)
        self.original = self.judge.original()

    def assess(self, candidate: Artifact) -> tuple[Accuracy, float]:
        """The accuracy of ``candidate``, and its mean divergence from the original's answers, which moves smoothly."""
        outputs = answers_of(candidate, self.data, self.threads)
        return self.judge.compare(outputs), float(divergence(self.judge, outputs).mean())


def split(artifact: Artifact, data: Dataset, share: float = 0.2) -> tuple[Dataset, Dataset]:
    """``data`` but for its last ``share``, and that, in multiples of the batch that ``artifact`` wants. Raises InvalidData."""
    return data.split(share, signature_of(artifact).smallest_batch)
