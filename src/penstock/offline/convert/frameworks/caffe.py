"""Caffe: networks (``.prototxt``) with their weights (``.caffemodel``), computed in numpy by the formulas of Caffe's source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from penstock.artifact import local_path
from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, Unsupported
from penstock.offline.convert.base import Axis, ConvertOptions, Exported, FrameworkModel, TensorLink
from penstock.offline.convert.caffe.caffemodel import read_caffemodel
from penstock.offline.convert.caffe.layer import Shape, Writer, check_size
from penstock.offline.convert.caffe.net import Net
from penstock.offline.convert.caffe.prototxt import read_prototxt
from penstock.offline.convert.declarations import check_inputs, declared_input
from penstock.offline.convert.reading import read_file
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import save
from penstock.tensor import Array, DataType, Signature, TensorSpec
from penstock.version import __version__

_OPSETS = range(19, 26)
_IR_VERSION = 10
_FIX = "give this input fixed sizes"
_BATCH = "N"
_UNKNOWN_SIZE = 224
_GIVE = "give NET.prototxt, with NET.caffemodel beside it or in --weights"
_MAX_BYTES = 64 << 20
"""Largest network that is read. The weights may be larger."""


class CaffeConverter:
    name = "caffe"
    version = __version__

    def open(self, source: Any, options: ConvertOptions) -> FrameworkModel:
        path = local_path(source)
        given = options.weights
        if path.suffix == ".caffemodel":
            given, path = given or path, path.with_suffix(".prototxt")
        fields = read_prototxt(read_file(path, "network", _GIVE, _MAX_BYTES))
        blobs = read_caffemodel(
            read_file(given or path.with_suffix(".caffemodel"), "file with the weights", _GIVE, 2 << 30)
        )
        return CaffeSource(Net(fields, blobs, options.outputs), path.name, options)


CONVERTER = CaffeConverter()


class CaffeSource:
    """A network that runs in numpy. Its tensors have the names of Caffe's blobs."""

    def __init__(self, net: Net, file: str, options: ConvertOptions) -> None:
        """Run ``net`` to find its shapes. Raises InvalidArgument if an input's shape is unknown, Unsupported, InvalidModel."""
        self._net, self._file = net, file
        self._warnings = [f"layer '{name}' is left out, because only training needs it" for name in net.left_out]
        shapes = _input_shapes(net, options)
        try:
            self._set_shapes(shapes)
        except (InvalidModel, Unsupported) as error:
            free = {dim for shape in shapes.values() for dim in shape if isinstance(dim, str)}
            if free != {_BATCH} or options.inputs or options.dynamic:
                raise
            self._warnings.append(f"the batch size is fixed, because {error.message}")
            self._set_shapes({name: ((net.inputs[name] or (1,))[0], *shape[1:]) for name, shape in shapes.items()})

    def _set_shapes(self, shapes: Mapping[str, tuple[int | str, ...]]) -> None:
        """Raises Unsupported if a layer only works for one size of a free dimension."""
        sizes = {
            dim: 1 if not axis else (self._net.inputs[name] or {axis: _UNKNOWN_SIZE})[axis]
            for name, shape in shapes.items()
            for axis, dim in enumerate(shape)
            if isinstance(dim, str)
        }
        try:
            self._shapes = self._shapes_at(shapes, sizes)
        except InvalidInput as error:
            raise InvalidModel(error.message, error.hint) from None
        others = self._shapes
        if sizes:
            try:
                others = self._shapes_at(shapes, {dim: 2 if size == 1 else size + 32 for dim, size in sizes.items()})
            except (InvalidInput, InvalidModel) as error:
                raise Unsupported(f"{error.message} at another size than {sizes}", _FIX) from None
            self._check_same(others)
        least = {dim: self._least(shapes, sizes, dim) for dim in sizes}
        self._dims: dict[str, tuple[int | str, ...]] = {
            tensor: tuple(f"{tensor}_{axis}" if one != other else one for axis, (one, other) in enumerate(pairs))
            for tensor, pairs in (
                (name, zip(self._shapes[name], others[name], strict=True)) for name in self._net.outputs
            )
        }
        self._dims |= shapes
        self.axes: Mapping[str, tuple[Axis, ...]] = {
            name: tuple(Axis(axis, dim, least[dim]) for axis, dim in enumerate(shape) if isinstance(dim, str))
            for name, shape in shapes.items()
        }
        self.signature = Signature(tuple(map(self._spec, shapes)), tuple(map(self._spec, self._net.outputs)))

    def _spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, DataType.FP32, tuple(-1 if isinstance(dim, str) else dim for dim in self._dims[name]))

    def _shapes_at(self, shapes: Mapping[str, tuple[int | str, ...]], sizes: Mapping[str, int]) -> dict[str, Shape]:
        """The shape of each tensor for these sizes of the free dimensions."""
        inputs = {}
        for name, shape in shapes.items():
            dims = [sizes[dim] if isinstance(dim, str) else dim for dim in shape]
            check_size(dims)
            inputs[name] = np.zeros(dims, np.float32)
        return {name: array.shape for name, array in self._net.run(inputs).items()}

    def _check_same(self, others: Mapping[str, Shape]) -> None:
        """Raise Unsupported unless the network is written with the same nodes for these other shapes."""
        one, other = Writer(_OPSETS[0]), Writer(_OPSETS[0])
        guilty, done = "", 0
        for step, _ in zip(self._net.write(one, self._shapes), self._net.write(other, others), strict=True):
            if one.nodes[done:] != other.nodes[done:]:
                guilty = guilty or step.layer.where
            done = len(one.nodes)
        for name, array in one.constants.items():
            if not guilty and not np.array_equal(array, other.constants[name], equal_nan=True):
                guilty = f"layer '{name.rpartition('/')[0]}'"
        if guilty:
            raise Unsupported(f"{guilty} depends on the size of its inputs", _FIX)

    def _least(self, shapes: Mapping[str, tuple[int | str, ...]], sizes: dict[str, int], dim: str) -> int:
        """The smallest size of ``dim`` that every layer accepts."""
        low, high = 1, sizes[dim]
        while low < high:
            middle = (low + high) // 2
            try:
                self._shapes_at(shapes, {**sizes, dim: middle})
                high = middle
            except (InvalidInput, InvalidModel):
                low = middle + 1
        return low

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self.values(inputs, self._net.outputs)

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        self.signature.check(inputs)
        try:
            found = self._net.run(inputs)
        except InvalidModel as error:  # the layers fit the inputs of ``open``, but not these
            raise InvalidInput(error.message, "change the sizes of the inputs") from None
        return {name: found[name] for name in names if name in found}

    def export(self, target: Path, opset: int) -> Exported:
        if opset not in _OPSETS:
            raise Unsupported(
                f"Caffe networks cannot be written with opset {opset}", f"use {_OPSETS[0]} to {_OPSETS[-1]}"
            )
        writer, links = Writer(opset), []
        for layer, _, tops in self._net.write(writer, self._shapes):
            where = f"{self._file}:{layer.fields.line}, layer '{layer.name}' ({layer.kind})"
            links += [TensorLink(top, top, where) for top in tops]
        inputs, outputs = (
            [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, self._dims[name]) for name in names]
            for names in (self._net.inputs, self._net.outputs)
        )
        graph = helper.make_graph(writer.nodes, "caffe", inputs, outputs)
        graph.initializer.extend(writer.tensors())
        imports = [helper.make_opsetid("", opset)]
        model = helper.make_model(graph, opset_imports=imports, producer_name="penstock", ir_version=_IR_VERSION)
        save(artifact_of(model), target)
        return Exported(f"penstock {__version__}", tuple(links), (), tuple(self._warnings))

    def close(self) -> None:
        """Nothing to do: the arrays end with the object."""


def _input_shapes(net: Net, options: ConvertOptions) -> dict[str, tuple[int | str, ...]]:
    """The shape of each input; names stand for free dimensions. By default, the batch is free. Raises InvalidArgument."""
    declared = {spec.name: spec for spec in options.inputs}
    check_inputs(options, net.inputs)
    found: dict[str, tuple[int | str, ...]] = {}
    for name, known in net.inputs.items():
        spec = declared.get(name)
        if spec is not None and spec.datatype not in (None, DataType.FP32):
            raise InvalidArgument(f"input '{name}' is float32 in Caffe", f'--inputs "{name}:float32[N,3,224,224]"')
        shape = declared_input(name, options, known).shape
        if not shape:
            raise InvalidArgument(
                f"the shape of input '{name}' is not in the network", f'--inputs "{name}:float32[N,3,224,224]"'
            )
        if known and len(known) != len(shape):
            raise InvalidArgument(
                f"input '{name}' has {len(known)} dimensions, not {len(shape)}", f"its shape is {list(known)}"
            )
        dims = list(shape)
        if name not in options.dynamic and not (spec and spec.shape):
            dims[0] = _BATCH
        found[name] = tuple(dims)
    return found
