"""The estimators that an estimator of scikit-learn consists of, and the values between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_PARTS = (
    *("steps", "transformers_", "transformer_list", "estimators_", "estimator_", "final_estimator_", "best_estimator_"),
    *("regressor_", "transformer_", "calibrated_classifiers_", "estimator"),
)
"""Attributes with the estimators that an estimator consists of."""
_NAMED = ("steps", "transformers_", "transformer_list")
"""Attributes with named estimators."""


def walk(model: Any) -> Iterator[Any]:
    """``model`` and all estimators in it."""
    if isinstance(model, (list, tuple, np.ndarray)):
        for one in model:
            yield from walk(one)
    elif hasattr(model, "__dict__") and not isinstance(model, type):
        if hasattr(model, "get_params"):
            yield model
        for part in _PARTS:
            yield from walk(vars(model).get(part, ()))


def steps_of(model: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The transformers of pipelines and of tables in ``model``, by the names of their steps, such as ``columns/scaler``."""
    for name, step, *_ in (pair for part in _NAMED for pair in getattr(model, part, ())):
        if hasattr(step, "transform"):
            yield f"{path}{name}", step
            yield from steps_of(step, f"{path}{name}/")


@contextlib.contextmanager
def recorded(steps: Mapping[str, Any]) -> Iterator[dict[str, list[Any]]]:
    """The results of ``transform`` of all calls of each step."""
    made: dict[str, list[Any]] = {name: [] for name in steps}

    def recording(transform: Any, results: list[Any]) -> Any:
        def recorded_transform(*arguments: Any, **options: Any) -> Any:
            results.append(transform(*arguments, **options))
            return results[-1]

        return recorded_transform

    for name, step in steps.items():
        vars(step)["transform"] = recording(step.transform, made[name])
    try:
        yield made
    finally:
        for step in steps.values():
            vars(step).pop("transform", None)
