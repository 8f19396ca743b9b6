"""Chooses which versions of a model to serve, and plans the changes. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.online.repository.config import VersionPolicy
from penstock.online.repository.model_source import ModelSource


class ChosenVersions(NamedTuple):
    """The result of applying a version policy. Both lists are in ascending order."""

    versions: list[str]
    """Versions to serve."""
    missing: list[str]
    """Versions that are named in the policy but do not exist."""


class VersionPlan(NamedTuple):
    """The three steps of a change, in order of execution. Each step lists versions in ascending order."""

    load: list[str]
    """Versions to load or reload."""
    resize: list[str]
    """Versions for which only the number of instances changes."""
    unload: list[str]
    """Versions to unload after the other steps."""


def choose(policy: VersionPolicy, available: Collection[str]) -> ChosenVersions:
    """Apply ``policy`` to the ``available`` versions."""
    ordered = sorted(available, key=int)
    if policy.all:
        return ChosenVersions(ordered, [])
    if policy.specific is not None:
        wanted = sorted({str(version) for version in policy.specific}, key=int)
        return ChosenVersions(
            [one for one in wanted if one in available], [one for one in wanted if one not in available]
        )
    return ChosenVersions(ordered[-policy.latest :], [])


def plan(served: Mapping[str, ModelSource], wanted: ModelSource, versions: Sequence[str]) -> VersionPlan:
    """Plan the change to ``versions`` of the source ``wanted``. ``served`` maps each currently served version to its source."""
    load = [one for one in versions if one not in served or needs_load(served[one], wanted, one)]
    resize = [
        version
        for version in versions
        if version not in load and served[version].given.instances != wanted.given.instances
    ]
    return VersionPlan(load, resize, sorted(served.keys() - set(versions), key=int))


def needs_load(old: ModelSource, new: ModelSource, version: str) -> bool:
    """True if ``version`` must be loaded again to change from ``old`` to ``new``."""
    if old.folder != new.folder or any(
        old.fingerprints.get(part) != new.fingerprints.get(part) for part in ("", version)
    ):
        return True
    if old.given.instances != new.given.instances and not (_can_change(old) and _can_change(new)):
        return True
    return old.given.lasting != new.given.lasting


def _can_change(source: ModelSource) -> bool:
    """True if instances can be added and removed while the model is served."""
    given = source.given
    limited = any(group.rate_limiter for group in given.instance_group)
    return bool(given.instance_group) and given.sequence_batching is None and not limited
