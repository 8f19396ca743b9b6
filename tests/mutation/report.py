"""The survivors of a module's mutations, compared with the list of those that are accepted."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tests.mutation.forked import Module
from tests.mutation.mutations import Mutation, mutations

ACCEPTED = Path(__file__).with_name("accepted.toml")


class Accepted(msgspec.Struct, frozen=True):
    """A survivor that no test has to notice, with the reason. ``function``, ``line`` and ``change`` are those of the mutation."""

    file: str
    function: str
    line: str
    change: str
    reason: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.function, self.line, self.change


class Report(msgspec.Struct):
    """The result for one file."""

    file: str
    killed: int = 0
    survivors: list[Mutation] = []
    listed: int = 0
    """Survivors that are accepted."""
    needless: list[Accepted] = []
    """Accepted mutations that do not survive."""

    @property
    def total(self) -> int:
        return self.killed + len(self.survivors) + self.listed

    def row(self) -> str:
        share = self.killed / self.total if self.total else 1.0
        return f"{self.file:48} {self.total:8} {self.killed:8} {len(self.survivors):8} {self.listed:8} {share:7.1%}"


HEADER = f"{'file':48} {'mutants':>8} {'killed':>8} {'survived':>8} {'accepted':>8} {'killed':>7}"


def accepted(file: str) -> list[Accepted]:
    """The accepted mutations of ``file``."""
    rows = tomllib.loads(ACCEPTED.read_text()).get("accepted", [])
    return [one for one in msgspec.convert(rows, list[Accepted]) if one.file == file]


def judge(file: str, seen: Callable[[Mutation, bool], None], chosen: Sequence[Mutation] | None = None) -> Report:
    """Run the tests of ``file`` on its mutations, or on those ``chosen``. ``seen`` gets each with whether it survives."""
    module = Module(file)
    known = {one.key: one for one in accepted(file)}
    report = Report(file)
    for mutation in mutations(module.source) if chosen is None else chosen:
        survives = module.survives(mutation.apply(module.source), module.tests_reaching(mutation.function))
        seen(mutation, survives)
        if not survives:
            report.killed += 1
            report.needless += [known[mutation.key]] if mutation.key in known else []
        elif mutation.key in known:
            report.listed += 1
        else:
            report.survivors.append(mutation)
    return report


def judge_aloud(file: str) -> Report:
    """The report of ``judge``; each survivor that is not accepted is printed when it is found."""
    listed = {one.key for one in accepted(file)}

    def say(mutation: Mutation, survives: bool) -> None:
        if survives and mutation.key not in listed:
            place = f"{mutation.function}:{mutation.number}: {mutation.line}"
            print(f"survives: {file}: {place}\n          {mutation.change}", flush=True)

    return judge(file, say)
