"""Judge versions of one INT8 model, in which different groups of operators stay float, on the same samples."""

from __future__ import annotations

from collections.abc import Collection

from penstock.measurement import Interval
from penstock.offline.compress.precision.groups import MixedModel
from penstock.offline.judge.judge import Judge, Judgement


class Trials:
    """Judges versions of ``mixed``. Each version is run only once. The data of ``judge`` must not be calibration data."""

    def __init__(self, mixed: MixedModel, judge: Judge) -> None:
        self.mixed, self.judge = mixed, judge
        self._known: dict[frozenset[str], Judgement] = {}

    @property
    def count(self) -> int:
        """Number of versions run so far."""
        return len(self._known)

    def outcome(self, floats: Collection[str] = ()) -> Judgement:
        """The judgement of the INT8 model in which the groups ``floats`` stay float."""
        key = frozenset(floats)
        if key not in self._known:
            self._known[key] = self.judge.assess(self.mixed.with_float(key))
        return self._known[key]

    def gain(self, before: Collection[str], after: Collection[str]) -> Interval:
        """The accuracy of the version with the groups ``after`` in float minus that of the version with ``before`` in float."""
        return self.judge.reference.interval(self.outcome(after).scores - self.outcome(before).scores)
