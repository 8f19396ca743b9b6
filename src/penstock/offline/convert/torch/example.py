"""Example inputs of a torch module: from the user's sample, or made for the declared types and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import nn

from penstock.engines.torch import to_tensor
from penstock.errors import InvalidArgument
from penstock.offline.convert.base import Axis, ConvertOptions
from penstock.offline.convert.declarations import declared_input
from penstock.offline.convert.torch.arguments import parameters_of
from penstock.tensor import Array, DataType, TensorSpec

SIZES = (16, 32, 64, 128, 224, 8, 4, 3, 2)
"""Sizes of free dimensions to try, until the module accepts one. The first axis of an input is a batch of 2 samples."""


class Declared(msgspec.Struct, frozen=True):
    """One flat input. A name in ``shape`` is a free dimension."""

    name: str
    datatype: DataType
    shape: tuple[int | str, ...]
    sample: Array | None = None

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.datatype, tuple(-1 if isinstance(dim, str) else dim for dim in self.shape))

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(Axis(index, dim) for index, dim in enumerate(self.shape) if isinstance(dim, str))

    def example(self, sizes: Mapping[str, int], seed: int) -> torch.Tensor:
        """A tensor whose free dimensions have ``sizes``. Samples are repeated; identifiers and lengths that are made are 1."""
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)
        if self.sample is not None:
            array = self.sample
            for axis, size in enumerate(shape):
                if array.shape[axis] != size:
                    array = np.take(array, np.arange(size) % max(1, array.shape[axis]), axis)
            return to_tensor(array)
        if self.datatype.is_float:
            return to_tensor(np.random.default_rng(seed).normal(size=shape).astype(self.datatype.dtype))
        return to_tensor(np.ones(shape, self.datatype.dtype))


def declared_inputs(module: nn.Module, options: ConvertOptions) -> list[Declared]:
    """The inputs that ``options`` declare. Raises InvalidArgument if they are missing or contradict each other."""
    names = [spec.name for spec in options.inputs] or list(options.sample)
    if not names:
        raise InvalidArgument("a PyTorch module does not say which inputs it takes", f"add {guess(module)}")
    if unknown := [name for name in (*options.sample, *options.dynamic) if name not in names]:
        raise InvalidArgument(f"the inputs {unknown} are not declared", f"the declared inputs are {names}")
    found = []
    for name in names:
        sample, spec = options.sample.get(name), declared_input(name, options)
        if spec.shape is None:
            raise InvalidArgument(f"the shape of input '{name}' is unknown", f"declare it like {guess(module)}")
        one = Declared(name, spec.datatype or DataType.FP32, spec.shape, sample)
        if one.datatype is DataType.BYTES:
            raise InvalidArgument(f"input '{name}' is declared as strings, but PyTorch has no string tensors")
        if sample is not None:
            one.spec.check(sample)
        found.append(one)
    return found


def sizes_to_try(declared: Sequence[Declared]) -> list[dict[str, int]]:
    """Sizes of the free dimensions, most plausible first. None is 1, because the exporter takes such a dimension for a constant."""
    fixed: dict[str, int] = {}
    free: list[str] = []
    for one in declared:
        for axis in one.axes:
            if one.sample is not None:
                fixed[axis.name] = max(2, one.sample.shape[axis.index])
            elif axis.index == 0:
                fixed.setdefault(axis.name, 2)
            else:
                free.append(axis.name)
    free = [name for name in dict.fromkeys(free) if name not in fixed]
    return [fixed | dict.fromkeys(free, size) for size in (SIZES if free else (2,))]


def guess(module: nn.Module) -> str:
    """The ``--inputs`` that the user probably has to type, from the parameters and the first layer."""
    names = [one.name for one in parameters_of(module) if one.is_required] or ["input"]
    shape = "float32[N,...]"
    for layer in module.modules():
        if isinstance(layer, nn.modules.conv._ConvNd):  # noqa: SLF001 - the base class of all convolutions
            shape = f"float32[N,{layer.in_channels},{','.join(('D', 'H', 'W')[-len(layer.kernel_size) :])}]"
        elif isinstance(layer, nn.Linear):
            shape = f"float32[N,{layer.in_features}]"
        elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            shape = "int64[N,L]"
        elif isinstance(layer, nn.RNNBase):
            shape = f"float32[N,L,{layer.input_size}]" if layer.batch_first else f"float32[L,N,{layer.input_size}]"
        else:
            continue
        break
    return " ".join(f'--inputs "{name}:{shape}"' for name in names)
