"""The table of standard steps. A step's module is imported when the step is first used, so that unused extras are not needed."""

from __future__ import annotations

from importlib import import_module

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig
from penstock.pipeline.steps.base import Step

_STEPS = {
    "constant": "constant:Constant",
    "sigmoid": "scores.activations:Sigmoid",
    "softmax": "scores.activations:Softmax",
}
"""Name of a step -> its module below this folder, and its class."""

NAMES = tuple(sorted(_STEPS))


def step_class(name: str) -> type[Step]:
    """The class of the step ``name``. Raises InvalidConfig if there is none."""
    if name not in _STEPS:
        raise InvalidConfig(
            f"there is no step '{name}'", did_you_mean(name, NAMES) or f"the steps are {', '.join(NAMES)}"
        )
    module, _, attribute = _STEPS[name].partition(":")
    found: type[Step] = getattr(import_module(f"penstock.pipeline.steps.{module}"), attribute)
    return found
