"""Which versions of a model are served, and what has to be done for it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.online.repository.definition import Definition
from penstock.protocol.messages import Message, ModelConfig


class Choice(NamedTuple):
    """By rising number the versions to serve, and those asked for by number that are not there."""

    versions: list[str]
    missing: list[str]


class Plan(NamedTuple):
    """What to do, in this order, by rising number of version."""

    load: list[str]
    """Versions to load, also in place of what is served of them."""
    resize: list[str]
    """Versions of which only the number of instances changes."""
    unload: list[str]
    """Versions to serve no more, once all the others are loaded."""


def choose(policy: Message, available: Collection[str]) -> Choice:
    """What ``policy``, a ``ModelVersionPolicy``, makes of the versions ``available``; an empty one wants the latest."""
    ordered = sorted(available, key=int)
    kind = policy.WhichOneof("policy_choice")
    if kind == "all":
        return Choice(ordered, [])
    if kind == "specific":
        wanted = sorted({str(version) for version in policy.specific.versions}, key=int)
        return Choice([one for one in wanted if one in available], [one for one in wanted if one not in available])
    return Choice(ordered[-max(1, policy.latest.num_versions) :], [])


def plan(served: Mapping[str, Definition], wanted: Definition, versions: Sequence[str]) -> Plan:
    """How to get from what is ``served``, by version with the definition that it was loaded by, to ``versions`` of ``wanted``."""
    load = [one for one in versions if one not in served or needs_load(served[one], wanted, one)]
    resize = [version for version in versions if version not in load and count(served[version]) != count(wanted)]
    return Plan(load, resize, sorted(served.keys() - set(versions), key=int))


def needs_load(old: Definition, new: Definition, version: str) -> bool:
    """Whether ``version``, loaded by ``old``, differs from what ``new`` defines by more than what can be changed in place."""
    if old.folder != new.folder or any(
        old.fingerprints.get(part) != new.fingerprints.get(part) for part in ("", version)
    ):
        return True
    if count(old) != count(new) and not (_can_change(old) and _can_change(new)):
        return True
    return bool(_lasting(old.given) != _lasting(new.given))


def count(definition: Definition) -> int:
    """How many instances its configuration asks for; 0 if it leaves that open."""
    return sum(max(1, group.count) for group in definition.given.instance_group)


def _can_change(definition: Definition) -> bool:
    """Whether the number of its instances can be changed while they run."""
    given, groups = definition.given, definition.given.instance_group
    return bool(
        groups
        and not given.HasField("sequence_batching")
        and not any(group.HasField("rate_limiter") for group in groups)
    )


def _lasting(given: Message) -> Message:
    """``given`` without the fields that can be changed in place: of groups of instances, only their number."""
    rest = ModelConfig()
    rest.CopyFrom(given)
    rest.ClearField("version_policy")
    for group in rest.instance_group:
        group.ClearField("count")
        group.ClearField("name")
    groups = {group.SerializeToString(deterministic=True): group for group in rest.instance_group}
    del rest.instance_group[:]
    rest.instance_group.extend(groups[key] for key in sorted(groups))
    return rest
