"""Lets a Triton Python model complete its configuration before it is initialised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidModel
from penstock.online.instances.python.options import PythonOptions, specs_of

_KEYS = {"name", "data_type", "dims", "optional"}


class AutoCompletion:
    """The argument and result of ``auto_complete_config``. Raises ValueError if a value contradicts the user's configuration."""

    def __init__(self, options: PythonOptions) -> None:
        self._max_batch = options.max_batch
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
        if self._max_batch is None:
            self._config["max_batch_size"] = int(max_batch_size)
        elif self._max_batch > max_batch_size:
            raise ValueError(
                f"the configuration's 'max_batch_size' is {self._max_batch}, above the model's {max_batch_size}"
            )

    def set_dynamic_batching(self) -> None:
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy: Mapping[str, bool]) -> None:
        if unknown := set(transaction_policy) - {"decoupled"}:
            raise ValueError(f"unknown fields of the transaction policy: {sorted(unknown)}")
        self._config["model_transaction_policy"] = dict(transaction_policy)

    def _add(self, field: str, tensor: dict[str, Any]) -> None:
        if unknown := set(tensor) - _KEYS:
            raise ValueError(f"unknown fields of an {field}: {sorted(unknown)}")
        (spec,) = specs_of([tensor], batched=False)
        known = next((one for one in self._config[field] if one["name"] == spec.name), None)
        if known is None:
            self._config[field].append({**tensor, "dims": list(spec.shape)})
        elif not known.get("dims"):
            known.update(tensor)
        elif specs_of([known], batched=False) != (spec,):
            raise ValueError(f"{field} '{spec.name}' differs from its configuration")


ModelConfig = AutoCompletion
"""Models import the class under this name."""


def completed(model: type, options: PythonOptions) -> dict[str, Any]:
    """The configuration, completed by ``auto_complete_config`` if defined. Raises InvalidModel, and the model's exceptions."""
    config = AutoCompletion(options)
    complete = getattr(model, "auto_complete_config", None)
    if complete is not None:
        config = complete(config)
        if not isinstance(config, AutoCompletion):
            raise InvalidModel("auto_complete_config did not return its argument", "return the configuration")
    return config.as_dict()
