"""The choice of versions to serve, and the plan of changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from penstock.online.repository.config import ModelConfig, VersionPolicy
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.policy import VersionPlan, choose, needs_load, plan
from penstock.online.repository.triton.schema import typed
from penstock.protocol import messages

_VERSIONS = st.sets(st.integers(1, 30).map(str))


def config(**fields: Any) -> ModelConfig:
    return typed(json_format.ParseDict(fields, messages.ModelConfig()))


def policy(**fields: Any) -> VersionPolicy:
    return config(version_policy=fields).version_policy


def model(versions: dict[str, str], shared: str = "", **fields: Any) -> ModelSource:
    folders = {version: Path("m") / version for version in versions}
    return ModelSource("m", Path("m"), folders, config(**fields), {"": shared, **versions})


def test_the_greatest_number_is_the_latest() -> None:
    available = ["2", "10", "9"]
    assert choose(policy(), available) == (["10"], [])
    assert choose(policy(latest={}), available) == (["10"], [])
    assert choose(policy(latest={"num_versions": 2}), available) == (["9", "10"], [])
    assert choose(policy(all={}), available) == (["2", "9", "10"], [])
    assert choose(policy(specific={"versions": [9, 3, 9]}), available) == (["9"], ["3"])
    assert choose(policy(), []) == ([], [])


@given(_VERSIONS, st.integers(1, 40), st.lists(st.integers(1, 30), max_size=5))
def test_a_policy_chooses_among_what_there_is(available: set[str], number: int, specific: list[int]) -> None:
    latest = choose(policy(latest={"num_versions": number}), available).versions
    assert len(latest) == min(number, len(available))
    assert all(int(left) < int(chosen) for left in available - set(latest) for chosen in latest)
    chosen, missing = choose(policy(specific={"versions": specific}), available)
    assert set(chosen) | set(missing) == set(map(str, specific))
    assert set(chosen) <= available
    assert not available & set(missing)


@given(
    st.dictionaries(st.integers(1, 9).map(str), st.sampled_from("ab")),
    st.dictionaries(st.integers(1, 9).map(str), st.sampled_from("ab")),
)
def test_a_plan_leads_to_what_is_wanted_and_touches_nothing_else(old: dict[str, str], new: dict[str, str]) -> None:
    before, after = model(old), model(new)
    steps = plan(dict.fromkeys(old, before), after, sorted(new, key=int))
    kept = {version for version in old if new.get(version) == old[version]}
    assert set(steps.load) == new.keys() - kept
    assert set(steps.unload) == old.keys() - new.keys()
    assert plan(dict.fromkeys(new, after), after, sorted(new, key=int)) == VersionPlan([], [], [])


@pytest.mark.parametrize(
    ("old", "new", "loads"),
    [
        ({}, {}, False),
        ({"max_batch_size": 4}, {"max_batch_size": 8}, True),
        ({}, {"version_policy": {"all": {}}}, False),
        ({"instance_group": [{"count": 1}]}, {"instance_group": [{"count": 2}]}, False),
        ({"instance_group": [{"count": 1}]}, {"instance_group": [{"count": 1}, {"count": 2, "name": "n"}]}, False),
        ({}, {"instance_group": [{"count": 2}]}, True),
        ({"instance_group": [{"count": 1}]}, {"instance_group": [{"count": 1, "kind": "KIND_CPU"}]}, True),
        (
            {"instance_group": [{"count": 1, "rate_limiter": {"priority": 1}}]},
            {"instance_group": [{"count": 2, "rate_limiter": {"priority": 1}}]},
            True,
        ),
    ],
    ids=["nothing", "batch", "versions", "count", "groups", "count-left-open", "kind", "rate-limiter"],
)
def test_what_can_be_changed_in_place(old: dict[str, Any], new: dict[str, Any], loads: bool) -> None:
    assert needs_load(model({"1": "a"}, **old), model({"1": "a"}, **new), "1") is loads


def test_a_version_whose_instances_change_is_not_loaded_again() -> None:
    old = model({"1": "a", "2": "a"}, instance_group=[{"count": 1}])
    new = model({"1": "b", "2": "a"}, instance_group=[{"count": 3}])
    assert plan({"1": old, "2": old}, new, ["1", "2"]) == VersionPlan(["1"], ["2"], [])


def test_files_that_all_versions_share_have_all_loaded_again() -> None:
    old, new = model({"1": "a", "2": "a"}, "labels"), model({"1": "a", "2": "a"}, "other labels")
    assert plan({"1": old, "2": old}, new, ["1", "2"]).load == ["1", "2"]
