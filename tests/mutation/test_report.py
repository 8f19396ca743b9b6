"""The list of accepted survivors, and a module judged in earnest."""

from __future__ import annotations

import multiprocessing

import msgspec
import pytest

from tests.mutation.mutations import mutations
from tests.mutation.report import accepted, judge
from tests.mutation.targets import DECIDING, SOURCE

JUDGED = "online/scheduler/brief_runs.py"


@pytest.mark.parametrize("file", DECIDING)
def test_what_is_accepted_exists_and_has_a_reason(file: str) -> None:
    known = {one.key for one in mutations((SOURCE / file).read_bytes())}
    listed = accepted(file)
    assert [one for one in listed if one.key not in known or not one.reason] == []
    assert len({one.key for one in listed}) == len(listed)
    assert len(listed) <= 1 + 0.1 * len(known)


def verdicts() -> list[tuple[str, bool]]:
    """Of the mutations of one line, and of one that changes nothing."""
    source = (SOURCE / JUDGED).read_bytes()
    chosen = [one for one in mutations(source) if "self.earned >= NEEDED and" in one.line]
    nothing = msgspec.structs.replace(chosen[0], change="nothing", new=source[chosen[0].start : chosen[0].end].decode())
    found: list[tuple[str, bool]] = []
    judge(JUDGED, lambda mutation, survives: found.append((mutation.change, survives)), [nothing, *chosen])
    return found


def test_tests_notice_changes_and_nothing_else() -> None:
    # In a process that has not imported the module.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(verdicts)
    assert found[0] == ("nothing", True)
    assert len(found) > 5
    assert not any(survives for _, survives in found[1:])
