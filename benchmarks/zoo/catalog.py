"""The models of all frameworks, as far as their packages are installed."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec

import benchmarks.zoo
from benchmarks.zoo.model import ZooModel
from penstock.offline.convert.registry import FORMATS


def frameworks() -> Iterator[tuple[str, dict[str, ZooModel]]]:
    """The name and the models of each file in this folder."""
    for module in pkgutil.iter_modules(benchmarks.zoo.__path__):
        models = getattr(importlib.import_module(f"benchmarks.zoo.{module.name}"), "MODELS", None)
        if models:
            yield module.name, models


def missing(model: ZooModel) -> str:
    """The package without which ``model`` cannot be converted here; empty if there is none."""
    package = FORMATS[model.format].package
    return package if package and find_spec(package) is None else ""


def models() -> dict[str, ZooModel]:
    """Each model that can be converted here, by ``framework/name``."""
    return {
        f"{framework}/{name}": model
        for framework, found in frameworks()
        for name, model in found.items()
        if not missing(model)
    }
