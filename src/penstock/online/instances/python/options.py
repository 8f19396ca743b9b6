"""The options with which an instance of a ``model.py`` is loaded."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.online.instances.python.tensors import datatype_of
from penstock.tensor import Signature, TensorSpec


class PythonOptions(msgspec.Struct, frozen=True):
    """The options of one instance of a Python model."""

    name: str = "model"
    version: str = "1"
    instance: str = ""
    """Name of this instance."""
    instances: int = 1
    """Number of instances of the model."""
    threads: int = 0
    """Default value of ``OMP_NUM_THREADS``. If 0, the variable is not set."""
    max_batch: int | None = None
    """``max_batch_size`` of the configuration; None if it is missing."""
    config: dict[str, Any] = {}
    """The user's configuration, in the JSON form of Triton's schema."""
    inputs: tuple[TensorSpec, ...] = ()
    """The inputs that the configuration declares, with their batch dimension."""
    outputs: tuple[TensorSpec, ...] = ()

    @property
    def parameters(self) -> dict[str, str]:
        given = self.config.get("parameters", {})
        return {name: str(value.get("string_value", "")) for name, value in given.items()}


def specs_of(tensors: list[dict[str, Any]], batched: bool) -> tuple[TensorSpec, ...]:
    """The tensor specs of a configuration's inputs or outputs. ``batched`` adds the batch dimension.

    Raises ValueError or KeyError for an invalid tensor.
    """
    specs = []
    for tensor in tensors:
        dims = (tensor.get("reshape") or {}).get("shape", tensor["dims"])
        shape = (-1,) * batched + tuple(int(dim) for dim in dims)
        specs.append(TensorSpec(tensor["name"], datatype_of(tensor["data_type"]), shape))
    return tuple(specs)


def joined(options: PythonOptions, signature: Signature) -> Signature:
    """``signature`` plus the tensors that only the configuration declares, such as the inputs that a sequence batcher fills."""
    inputs = {spec.name: spec for spec in (*options.inputs, *signature.inputs)}
    outputs = {spec.name: spec for spec in (*options.outputs, *signature.outputs)}
    return Signature(tuple(inputs.values()), tuple(outputs.values()))
