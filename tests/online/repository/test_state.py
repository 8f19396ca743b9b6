"""The transitions of a version's states, and its row of the index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.state import NEXT, VersionPhase, VersionState

SOURCE = ModelSource("m", Path(), {"1": Path("m.onnx")})


class Served:
    """The part of a handle that a row of the index reads."""

    def __init__(self, is_healthy: bool = True, instance_count: int = 1) -> None:
        self.is_healthy, self.instance_count = is_healthy, instance_count


def row(version: VersionState, problem: str = "") -> tuple[str, str]:
    found = version.row("m", "1", problem)
    assert (found["name"], found["version"]) == ("m", "1")
    return found["state"], found["reason"]


def served(**health: Any) -> VersionState:
    version = VersionState()
    version.begin()
    version.serve(Served(**health), SOURCE, 3)
    return version


def test_a_version_is_loaded_served_and_leaves_when_it_has_answered() -> None:
    version = VersionState()
    assert row(version) == ("UNAVAILABLE", "")
    version.begin()
    assert row(version) == ("LOADING", "")
    version.serve(Served(), SOURCE, 3)
    assert row(version) == ("READY", "")
    assert version.row("m", "1")["generation"] == 3
    version.leave()
    assert (row(version), version.handle, version.source) == (("UNLOADING", ""), None, None)
    version.end()
    assert row(version) == ("UNAVAILABLE", "unloaded")


def test_a_version_that_cannot_be_loaded_says_why() -> None:
    version = VersionState()
    version.begin()
    version.fail("no such file")
    assert row(version) == ("UNAVAILABLE", "no such file")
    version.begin()
    assert row(version) == ("LOADING", "")


def test_what_is_served_goes_on_being_served_while_and_though_reloading_fails() -> None:
    version = served()
    version.begin()
    assert row(version) == ("READY", "")
    version.fail("the new file is broken")
    assert row(version) == ("READY", "the new file is broken")
    version.confirm(SOURCE)
    assert row(version) == ("READY", "")


def test_a_version_loaded_again_while_the_old_one_leaves_stays() -> None:
    version = served()
    version.leave()
    version.begin()
    version.serve(Served(), SOURCE, 4)
    version.end()
    assert row(version) == ("READY", "")


def test_what_is_served_twice_over_has_left_when_both_have() -> None:
    version = served()
    version.leave()
    version.begin()
    version.serve(Served(), SOURCE, 4)
    version.leave()
    version.end()
    assert row(version)[0] == "UNLOADING"
    version.end()
    assert row(version)[0] == "UNAVAILABLE"


def test_a_problem_of_the_model_and_dead_instances_are_told() -> None:
    assert row(served(), "the folder is gone") == ("READY", "the folder is gone")
    state, reason = row(served(is_healthy=False))
    assert (state, "restarted" in reason) == ("UNAVAILABLE", True)
    assert "a model that it needs" in row(served(is_healthy=False, instance_count=0))[1]


@given(st.sampled_from([None, *VersionPhase]), st.sampled_from(VersionPhase))
def test_states_move_only_as_the_table_says(before: VersionPhase | None, after: VersionPhase) -> None:
    version = VersionState(before)
    if after in NEXT[before]:
        version.move(after)
        assert version.state is after
    else:
        with pytest.raises(AssertionError):
            version.move(after)
