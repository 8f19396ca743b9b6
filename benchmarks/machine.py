"""The machine on which a result is measured, and the versions of the packages."""

from __future__ import annotations

import datetime as dt
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from benchmarks.peers.catalog import PEERS
from penstock.perf.conditions import ConditionsWatch
from penstock.resources import machine_facts

_PACKAGES = (
    "penstock", "onnxruntime", "openvino", "numpy", "orjson", "httptools", "uvloop", "fastapi", "uvicorn", "pydantic",
    "torch", "nncf", "scikit-learn",
)  # fmt: skip


class MachineWatch:
    """Watches the machine's load, beginning with the creation of this object."""

    def __init__(self) -> None:
        self._facts = machine_facts()
        self._watch = ConditionsWatch(self._facts.cores)

    def finish(self) -> dict[str, Any]:
        """The field ``machine`` of a ``Result``."""
        return {
            **msgspec.to_builtins(self._facts),
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            **msgspec.to_builtins(self._watch.finish()),
            "versions": _versions(),
        }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    peers = {peer.title: peer.version() for peer in PEERS.values()}
    return found | {title: version for title, version in peers.items() if version}
