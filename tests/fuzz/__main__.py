"""``make fuzz MINUTES=n``: mutated messages for all targets on all cores, guided by the code that they reach.

``python -m tests.fuzz TARGET... --runs N --seed S`` tries N messages that follow from the seed; ``--replay FILE`` tries one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
import warnings
from contextlib import closing
from pathlib import Path

from tests.fuzz.campaign import TARGETS, Campaign, Finding, make_target, minimise, replay, run
from tests.fuzz.corpus import FOLDER, Corpus
from tests.fuzz.spread import LastMessage, command, spread


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="all if none is named")
    parser.add_argument("--minutes", type=float, default=5, help="time for all targets, on all cores")
    parser.add_argument("--seconds", type=float, help="time for each target, in this process")
    parser.add_argument("--runs", type=int, help="messages for each target, in this process")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--replay", type=Path, metavar="FILE", help="give one target this message only")
    parser.add_argument(
        "--corpus", type=Path, default=FOLDER, metavar="FOLDER", help="where the corpus of each target is"
    )
    parser.add_argument("--last", type=Path, metavar="FILE", help="keep the current message in this file")
    given = parser.parse_args()
    names = given.targets or list(TARGETS)
    if given.replay is None and given.seconds is None and given.runs is None:
        return 0 if spread(names, given.minutes, given.seed, os.cpu_count() or 1, given.corpus) else 1
    sys.path.append(str(Path(__file__).parents[1]))  # as in the tests, whose modules import one another by short names
    warnings.simplefilter("error")  # as in the tests
    logging.getLogger("penstock").addHandler(logging.NullHandler())  # instead of printing warnings
    for name in names:
        try:
            if given.replay is not None:
                replay(name, [given.replay.read_bytes()])
            elif given.seconds is None:
                print(run(name, given.runs, given.seed), flush=True)
            else:
                _explore(name, given, Corpus(name, given.corpus))
        except Finding as finding:
            traceback.print_exception(finding.__cause__)
            if given.replay is None:
                print(f"repeat: {command(name, Corpus(name, given.corpus).add_finding(minimise(name, finding)))}")
            print(finding)
            return 1
    return 0


def _explore(name: str, given: argparse.Namespace, corpus: Corpus) -> None:
    with closing(make_target(name)) as target:
        campaign = Campaign(name, target, given.seed)
        if given.last is not None:
            campaign.watch = LastMessage(given.last).writer()
        report = campaign.run(seconds=given.seconds, corpus=corpus)
    print(report, flush=True)
    report.check(target.growth_factor)


if __name__ == "__main__":
    sys.exit(main())
