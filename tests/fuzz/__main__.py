"""``python -m tests.fuzz TARGET... --runs N --seed S``: mutated messages, thousands a second, anywhere.

With ``--coverage SECONDS`` the messages are guided by what code they reach instead; that needs the package ``atheris``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from pathlib import Path

from tests.fuzz.campaign import TARGETS, Finding, make_target, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="+", choices=[*TARGETS, "all"])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", type=int, metavar="SECONDS", help="one target, guided by coverage (atheris)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="give one target this message only")
    given = parser.parse_args()
    names = list(TARGETS) if "all" in given.targets else given.targets
    if given.replay:
        make_target(names[0]).run(given.replay.read_bytes())
        return 0
    if given.coverage:
        _run_guided(names[0], given.coverage)
    for name in names:
        try:
            print(run(name, given.runs, given.seed), flush=True)
        except Finding as finding:
            with tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".bin", delete=False) as file:
                file.write(finding.data)
            traceback.print_exception(finding.__cause__)
            raise SystemExit(f"{finding}\nkept in {file.name}: --replay {file.name}") from None
    return 0


def _run_guided(name: str, seconds: int) -> None:
    """Until ``seconds`` have passed or something is found; libFuzzer ends the process."""
    import atheris  # noqa: PLC0415 - optional, and it has to be there before what it instruments

    with atheris.instrument_imports(include=["penstock.online", "penstock.tensor", "tests.fuzz"]):
        target = make_target(name)
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(b"".join(seed))
    options = [f"-max_total_time={seconds}", "-timeout=10", f"-artifact_prefix={corpus}/found-", "-max_len=8192"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
