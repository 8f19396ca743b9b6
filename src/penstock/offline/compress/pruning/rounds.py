"""Pruning in rounds. A round starts from an earlier round, is judged by a contract on held-out data, and is stored in a folder.

A later run with the same model, data and options reads the rounds that the folder holds, and then continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from penstock.artifact import Artifact, sha256
from penstock.errors import ContractUnmet, InvalidArgument
from penstock.offline.compress.checkpoint import read_checkpoint, write_checkpoint
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge


class RoundEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One round, with its accuracy on held-out data."""

    start: int
    """The number of the round from which this round started; -1 stands for the original."""
    accuracy: float = 0.0
    loss: float = 0.0
    """Loss of accuracy on held-out samples, against the original."""
    objection: str = ""
    """The reason why the round fails the contract; empty if it meets the contract."""


class _Kept(msgspec.Struct, frozen=True):
    origin: str
    entry: dict[str, Any]
    model: bytes


E = TypeVar("E", bound=RoundEntry)


def last_good(entries: Sequence[RoundEntry]) -> int:
    """The number of the last round that meets the contract; -1 if there is none."""
    return max((number for number, entry in enumerate(entries) if not entry.objection), default=-1)


class Rounds(Generic[E]):
    """The rounds of a run so far. In memory: the original, and the models of the best, the last good, and the last round."""

    def __init__(
        self,
        kind: type[E],
        name: str,
        judge: Judge,
        contract: Contract,
        rank: Callable[[E], float],
        folder: Path | None,
        *decides: object,
    ) -> None:
        """The best round is the first round with the highest ``rank`` of all that meet ``contract``. The contract's latency limit is
        ignored.

        ``folder`` stores every round. A run is identified by the original, the held-out data, and ``decides`` (plain data).
        """
        self.entries: list[E] = []
        self.models = {-1: judge.original}
        """The models in memory, by number of the round; -1 is the original."""
        self.judge = judge
        self._kind, self._name, self._contract, self._rank, self._folder = kind, name, contract, rank, folder
        self._origin = sha256(msgspec.json.encode([judge.original.digest, judge.data.digest, *decides], order="sorted"))

    @property
    def best(self) -> int:
        """The number of the best round; -1 if there is none."""
        good = [number for number, entry in enumerate(self.entries) if not entry.objection]
        return max(good, key=lambda number: self._rank(self.entries[number]), default=-1)

    def take(self, make: Callable[[Path | None], tuple[Artifact, E] | None]) -> bool:
        """Read the next round from the folder or, if it is not stored, ``make`` its model and entry. False if ``make`` returns None.

        ``make`` is called with a path for a checkpoint. Raises InvalidArgument if the folder holds another run or a damaged file.
        """
        number = len(self.entries)
        path = self._folder / f"{self._name}-{number:03}.kept" if self._folder else None
        found = self._stored(path) if path else None
        if found is None:
            checkpoint = path.with_name(f"training-{number:03}.kept") if path else None
            made = make(checkpoint)
            if made is None:
                return False
            found = made[0], self._judged(*made)
            if path and checkpoint:
                write_checkpoint(path, _Kept(self._origin, msgspec.to_builtins(found[1]), found[0].data))
                checkpoint.unlink(missing_ok=True)
                # A stored later round continued from a different model, so it is no longer valid.
                path.with_name(f"{self._name}-{number + 1:03}.kept").unlink(missing_ok=True)
        self.models[number], entry = found
        self.entries.append(entry)
        needed = {-1, self.best, last_good(self.entries), number}
        self.models = {n: model for n, model in self.models.items() if n in needed}
        return True

    def result(self, message: str, hint: str) -> tuple[Artifact, dict[str, Any]]:
        """The best model, and the facts of the run. If no round is good, raises ContractUnmet with all rounds as ``candidates``."""
        entries = msgspec.to_builtins(self.entries)
        if self.best < 0:
            unmet = ContractUnmet(message, hint)
            unmet.candidates = tuple(entries)
            raise unmet
        best = self.entries[self.best]
        return self.models[self.best], {
            "metric": self.judge.metric,
            "original_accuracy": self.judge.baseline.accuracy.value,
            "accuracy": best.accuracy,
            "loss": best.loss,
            "samples": self.judge.data.count,
            "chosen": self.best,
            f"{self._name}s": entries,
        }

    def _judged(self, model: Artifact, entry: E) -> E:
        accuracy = self.judge.assess(model).accuracy
        objection = self._contract.accuracy_objection(accuracy)
        return msgspec.structs.replace(entry, accuracy=accuracy.value, loss=accuracy.loss.value, objection=objection)

    def _stored(self, path: Path) -> tuple[Artifact, E] | None:
        kept = read_checkpoint(path, _Kept)
        if kept is None:
            return None
        if kept.origin != self._origin:
            raise InvalidArgument(
                f"'{path.parent.name}' holds a pruning run of another model, other data or other options",
                "give another folder, or delete this one",
            )
        return Artifact.from_bytes(kept.model), msgspec.convert(kept.entry, self._kind)
