"""Which resources each dialect has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.online.server.config import Dialect
from penstock.online.server.http.dialects.tensorflow_serving import KSERVE_V1, TENSORFLOW_SERVING
from penstock.online.server.http.dialects.torchserve import TORCHSERVE
from penstock.online.server.http.routes import Resource

_RESOURCES: Mapping[Dialect, Sequence[Resource]] = {
    "tensorflow-serving": TENSORFLOW_SERVING,
    "kserve-v1": KSERVE_V1,
    "torchserve": TORCHSERVE,
}


def dialect_resources(dialects: Iterable[Dialect]) -> list[Resource]:
    """The resources of ``dialects``; one that several have takes the methods of each. What has a verb behind a name comes first."""
    merged: dict[str, Resource] = {}
    for dialect in dialects:
        for resource in _RESOURCES[dialect]:
            known = merged.get(resource.path, resource)
            merged[resource.path] = known._replace(handlers={**resource.handlers, **known.handlers})
    return sorted(merged.values(), key=lambda resource: ":" not in resource.path)
