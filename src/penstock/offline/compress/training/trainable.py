"""Run an ONNX graph as a torch module, and write its trained weights back into the same graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import numpy as np
from onnx import TensorProto

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, InvalidModel, PenstockError
from penstock.offline.compress.training.operators import Node
from penstock.offline.compress.training.operators.elementwise import DTYPES
from penstock.offline.compress.training.program import Shape, constant_tensors, read_program
from penstock.offline.compress.training.torch import Tensor, nn, torch
from penstock.offline.optimize.mapped import artifact_of, replace_data
from penstock.offline.optimize.model import read_proto
from penstock.tensor import Array

Hook = Callable[[Tensor], Tensor]


class TrainableModel(nn.Module):  # type: ignore[misc]
    """An ONNX graph whose FP32 weights are parameters, computed on the CPU.

    An FP32 constant is a weight if it is the weight, bias or scale operand of an operator. Any other differentiable operand of more
    than one element is also a weight, unless it contains a value of 1e4 or more, like a mask. Settings, such as the bounds of Clip or
    the statistics of BatchNormalization, are not weights. ``frozen`` names weights to leave unchanged; ``trained`` names other
    constants to train. Integers are computed exactly. FP16 and BF16 constants are not trained.

    If several nodes read a weight, they share one parameter. BatchNormalization keeps its statistics, regardless of ``train()``.
    ``double()`` gives the same model in FP64.

    Raises InvalidModel if the bytes are not an ONNX model; Unsupported, naming every operator without an implementation;
    InvalidArgument if a name in ``frozen`` or ``trained`` is not a constant.
    """

    def __init__(self, artifact: Artifact, *, frozen: Collection[str] = (), trained: Collection[str] = ()) -> None:
        super().__init__()
        self.artifact = artifact
        program = read_program(read_proto(artifact), frozen, trained)
        self._program = msgspec.structs.replace(program, constants={})
        self.input_names = list(program.inputs)
        self.output_names = list(program.outputs)
        self.weights: dict[str, Any] = {}
        """Parameters, by the name of the constant."""
        self.weight_hooks: dict[str, Hook] = {}
        """Hooks, by name of the constant, called whenever the constant is read. A hook must be differentiable and keep the shape."""
        self.value_hooks: dict[str, Hook] = {}
        """Hooks, by the name of an input or computed tensor, called as soon as the tensor is available."""
        self._computed = {name for step in program.steps for name in step.node.outputs} | set(self.input_names)
        self._keys: dict[str, str] = {}
        # ONNX names can contain dots; torch names cannot.
        for index, (name, array) in enumerate(program.constants.items()):
            tensor, key = _to_tensor(array), f"constant{index}"
            self._keys[name] = key
            if name in program.weights:
                self.weights[name] = nn.Parameter(tensor)
                self.register_parameter(key, self.weights[name])
            else:
                self.register_buffer(key, tensor, persistent=False)

    @property
    def fixed_rows(self) -> int | None:
        """The model's fixed batch size; None if the batch size is free."""
        return next((shape[0] for shape in self._program.inputs.values() if shape), None)

    def forward(self, inputs: Mapping[str, Tensor], also: Collection[str] = ()) -> dict[str, Tensor]:
        """The outputs, and the tensors and constants in ``also``, by name. Hooks have been applied to all of them.

        Raises InvalidArgument if inputs are missing or do not fit, if ``also`` or a hook names an unknown tensor, or if a node cannot
        be computed.
        """
        self._check_names(also)
        values = {name: self._hooked(name, _fit(name, shape, inputs)) for name, shape in self._program.inputs.items()}
        kept = {name: values[name] for name in also if name in values}
        for node, run, freed in self._program.steps:
            for name in node.inputs:
                if name and name not in values:
                    values[name] = self.constant(name)
            operands = [values[name] if name else None for name in node.inputs]
            for name, result in zip(node.outputs, _compute(node, run, operands), strict=False):
                values[name] = self._hooked(name, result)
                if name in also:
                    kept[name] = values[name]
            del operands
            for name in freed:
                values.pop(name, None)
        kept |= {name: self.constant(name) for name in also if name in self._keys}
        outputs = {name: self._output(name, kind, values) for name, kind in self._program.outputs.items()}
        return kept | outputs

    def computes(self, name: str) -> bool:
        """True if ``name`` is an input, or the output of an operator that is not a constant."""
        return name in self._computed

    def constant(self, name: str) -> Tensor:
        """The constant ``name``, with its hook applied. Raises InvalidArgument if there is no such constant."""
        if name not in self._keys:
            raise InvalidArgument(f"the model has no constant '{name}'")
        stored = getattr(self, self._keys[name])
        hook = self.weight_hooks.get(name)
        return stored if hook is None else hook(stored)

    def to_artifact(self, step: str, options: dict[str, Any], facts: dict[str, Any]) -> Artifact:
        """The same graph with the current weights, with hooks applied.

        Raises InvalidArgument if a hook changed a shape, InvalidModel if a weight is not finite.
        """
        proto = read_proto(self.artifact)
        tensors = constant_tensors(proto.graph)
        with torch.no_grad():
            for name in sorted({*self.weights, *self.weight_hooks} & tensors.keys()):
                _write(name, tensors[name], self.constant(name).detach().cpu())
        return self.artifact.derive(artifact_of(proto), step, options, facts)

    def _hooked(self, name: str, value: Tensor) -> Tensor:
        hook = self.value_hooks.get(name)
        return value if hook is None else hook(value)

    def _output(self, name: str, kind: int, values: dict[str, Tensor]) -> Tensor:
        value = values[name] if name in values else self.constant(name)
        dtype = DTYPES.get(kind, value.dtype)
        # Quantised tensors are computed as floats.
        return value.to(dtype) if value.is_floating_point() and not dtype.is_floating_point else value

    def _check_names(self, also: Collection[str]) -> None:
        if unknown := sorted(set(also) - self._computed - self._keys.keys()):
            raise InvalidArgument(f"no tensors of the model are called {unknown}")
        if unknown := sorted(self.value_hooks.keys() - self._computed):
            raise InvalidArgument(f"value hooks are given for {unknown}, which the model does not compute")
        if unknown := sorted(self.weight_hooks.keys() - self._keys.keys()):
            raise InvalidArgument(f"weight hooks are given for {unknown}, which are not constants of the model")


def to_tensors(arrays: Mapping[str, Array], model: TrainableModel) -> dict[str, Tensor]:
    """Convert those ``arrays`` that are inputs of ``model`` to tensors."""
    return {name: _to_tensor(arrays[name]) for name in model.input_names if name in arrays}


def _to_tensor(array: Array) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    try:
        # Copied, because torch shares the memory of the array.
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError:
        raise InvalidArgument(f"training does not support arrays of type {array.dtype}") from None


def _fit(name: str, shape: Shape, inputs: Mapping[str, Tensor]) -> Tensor:
    if name not in inputs:
        raise InvalidArgument(f"input '{name}' is missing", f"given are {sorted(inputs)}")
    got = tuple(inputs[name].shape)
    if shape is not None and (
        len(got) != len(shape) or any(want not in (None, size) for want, size in zip(shape, got, strict=True))
    ):
        raise InvalidArgument(
            f"input '{name}' must have shape {['?' if size is None else size for size in shape]}, got {list(got)}",
            "export the model with a free batch axis, or give batches of the model's batch size",
        )
    return inputs[name]


def _compute(node: Node, run: Callable[..., Any], operands: list[Tensor | None]) -> tuple[Tensor, ...]:
    try:
        results = run(node, *operands)
    except PenstockError:
        raise
    except Exception as error:  # torch raises various exceptions for shapes and types that do not fit
        first = str(error).strip().partition("\n")[0][:300]
        raise InvalidArgument(f"'{node.outputs[0]}' ({node.op_type}) cannot be computed: {first}") from error
    results = results if isinstance(results, tuple) else (results,)
    if len(results) < len(node.outputs):
        raise node.unsupported("its additional outputs")
    return results


def _write(name: str, tensor: TensorProto, value: Tensor) -> None:
    if tuple(value.shape) != tuple(tensor.dims):
        raise InvalidArgument(
            f"the hook of '{name}' changed its shape from {list(tensor.dims)} to {list(value.shape)}",
            "hooks must keep shapes; change the graph instead",
        )
    if not torch.isfinite(value).all():
        raise InvalidModel(f"'{name}' is not finite: training diverged", "lower the learning rate")
    dtype = DTYPES[tensor.data_type]
    if not dtype.is_floating_point:
        bounds = torch.iinfo(dtype)
        value = value.to(torch.float64).round().clamp(bounds.min, bounds.max)
    replace_data(tensor, value.to(dtype).reshape(-1).view(torch.uint8).numpy().tobytes())
