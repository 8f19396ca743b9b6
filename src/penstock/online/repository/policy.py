"""Which versions of a model are served, and what has to be done for it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.online.repository.config import VersionPolicy
from penstock.online.repository.model_source import ModelSource


class ChosenVersions(NamedTuple):
    """By rising number the versions to serve, and those asked for by number that are not there."""

    versions: list[str]
    missing: list[str]


class VersionPlan(NamedTuple):
    """What to do, in this order, by rising number of version."""

    load: list[str]
    """Versions to load, also in place of what is served of them."""
    resize: list[str]
    """Versions of which only the number of instances changes."""
    unload: list[str]
    """Versions to serve no more, once all the others are loaded."""


def choose(policy: VersionPolicy, available: Collection[str]) -> ChosenVersions:
    """What ``policy`` makes of the versions ``available``."""
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
    """How to get from what is ``served``, by version with the source that it was loaded from, to ``versions`` of ``wanted``."""
    load = [one for one in versions if one not in served or needs_load(served[one], wanted, one)]
    resize = [
        version
        for version in versions
        if version not in load and served[version].given.instances != wanted.given.instances
    ]
    return VersionPlan(load, resize, sorted(served.keys() - set(versions), key=int))


def needs_load(old: ModelSource, new: ModelSource, version: str) -> bool:
    """Whether ``version``, loaded by ``old``, differs from what ``new`` defines by more than what can be changed in place."""
    if old.folder != new.folder or any(
        old.fingerprints.get(part) != new.fingerprints.get(part) for part in ("", version)
    ):
        return True
    if old.given.instances != new.given.instances and not (_can_change(old) and _can_change(new)):
        return True
    return old.given.lasting != new.given.lasting


def _can_change(source: ModelSource) -> bool:
    """Whether the number of its instances can be changed while they run."""
    given = source.given
    limited = any(group.rate_limiter for group in given.instance_group)
    return bool(given.instance_group) and given.sequence_batching is None and not limited
