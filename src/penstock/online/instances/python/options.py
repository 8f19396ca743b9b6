"""The options of a ``model.py``: how it is served."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.online.instances.python.tensors import datatype_of
from penstock.tensor import Signature, TensorSpec


class PythonOptions(msgspec.Struct, frozen=True):
    """How one instance of a Python model is served."""

    name: str = "model"
    version: str = "1"
    instance: str = ""
    """Name of this instance."""
    instances: int = 1
    """How many there are."""
    threads: int = 0
    """What ``OMP_NUM_THREADS`` becomes, unless it is set; 0 leaves it alone."""
    max_batch: int | None = None
    """The configuration's ``max_batch_size``; None if it gives none."""
    config: dict[str, Any] = {}
    """The model's configuration in the JSON form of Triton's schema, as the user has written it."""
    inputs: tuple[TensorSpec, ...] = ()
    """As the configuration declares them, with the batch dimension; empty if it does not."""
    outputs: tuple[TensorSpec, ...] = ()

    @property
    def parameters(self) -> dict[str, str]:
        given = self.config.get("parameters", {})
        return {name: str(value.get("string_value", "")) for name, value in given.items()}


def specs_of(tensors: list[dict[str, Any]], batched: bool) -> tuple[TensorSpec, ...]:
    """The inputs or outputs of a configuration, with their batch dimension. Raises ValueError, KeyError for one that is none."""
    specs = []
    for tensor in tensors:
        dims = (tensor.get("reshape") or {}).get("shape", tensor["dims"])
        shape = (-1,) * batched + tuple(int(dim) for dim in dims)
        specs.append(TensorSpec(tensor["name"], datatype_of(tensor["data_type"]), shape))
    return tuple(specs)


def joined(options: PythonOptions, signature: Signature) -> Signature:
    """``signature`` with what only the configuration declares, such as the inputs that a sequence batcher makes."""
    inputs = {spec.name: spec for spec in (*options.inputs, *signature.inputs)}
    outputs = {spec.name: spec for spec in (*options.outputs, *signature.outputs)}
    return Signature(tuple(inputs.values()), tuple(outputs.values()))
