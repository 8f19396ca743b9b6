"""``make mutants``: changes each decision of the deciding code, and reports the changes that no test notices.

``FILE=offline/judge/contract.py`` judges one file. The exit status is 1 if a mutation survives that ``accepted.toml`` does not list.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys

from tests.mutation.report import HEADER, judge_aloud
from tests.mutation.targets import DECIDING


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="a path below src/penstock; default: the deciding code"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of files to judge at a time")
    given = parser.parse_args()
    # Each file in a process of its own, which has not imported it yet; one thread each, because a fork has no others.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=1) as pool:
        reports = list(pool.imap(judge_aloud, given.files or DECIDING, chunksize=1))
    print(f"\n{HEADER}")
    for report in reports:
        print(report.row())
    for report in reports:
        for one in report.needless:
            print(f"{report.file}: accepted.toml lists '{one.change}' of '{one.line}', which a test notices: remove it")
    return int(any(report.survivors or report.needless for report in reports))


if __name__ == "__main__":
    sys.exit(main())
