"""The configuration that a Triton Python model may complete before it is initialised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidModel
from penstock.online.instances.python.options import PythonOptions, specs_of

_KEYS = {"name", "data_type", "dims", "optional"}


class AutoCompletion:
    """What ``auto_complete_config`` is given and returns. A contradiction to the configuration's file raises ValueError."""

    def __init__(self, options: PythonOptions) -> None:
        self._given = options.max_batch
        self._config: dict[str, Any] = {
            **options.config,
            "name": options.name,
            "backend": "python",
            "max_batch_size": options.max_batch or 0,
        }
        for field in ("input", "output"):
            self._config[field] = [dict(tensor) for tensor in options.config.get(field, ())]

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def add_input(self, input: Mapping[str, Any], optional: bool = False) -> None:
        self._add("input", {**input, "optional": True} if optional else dict(input))

    def add_output(self, output: Mapping[str, Any]) -> None:
        self._add("output", dict(output))

    def set_max_batch_size(self, max_batch_size: int) -> None:
        if self._given is None:
            self._config["max_batch_size"] = int(max_batch_size)
        elif self._given > max_batch_size:
            raise ValueError(
                f"the configuration's 'max_batch_size' is {self._given}, above the model's {max_batch_size}"
            )

    def set_dynamic_batching(self) -> None:
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy: Mapping[str, bool]) -> None:
        if unknown := set(transaction_policy) - {"decoupled"}:
            raise ValueError(f"the transaction policy has no {sorted(unknown)}")
        self._config["model_transaction_policy"] = dict(transaction_policy)

    def _add(self, field: str, tensor: dict[str, Any]) -> None:
        if unknown := set(tensor) - _KEYS:
            raise ValueError(f"an {field} has no {sorted(unknown)}")
        (spec,) = specs_of([tensor], batched=False)
        for known in self._config[field]:
            if known["name"] != spec.name:
                continue
            if not known.get("dims"):
                known.update(tensor)
            elif specs_of([known], batched=False) != (spec,):
                raise ValueError(f"{field} '{spec.name}' differs from the configuration's")
            return
        self._config[field].append({**tensor, "dims": list(spec.shape)})


ModelConfig = AutoCompletion
"""The name that models know it by."""


def completed(model: type, options: PythonOptions) -> dict[str, Any]:
    """The configuration, completed by ``model`` if it does that. Raises InvalidModel, and what the model raises."""
    config = AutoCompletion(options)
    complete = getattr(model, "auto_complete_config", None)
    if complete is not None:
        config = complete(config)
        if not isinstance(config, AutoCompletion):
            raise InvalidModel("auto_complete_config returned no model configuration", "return what it was given")
    return config.as_dict()
