"""TensorFlow: SavedModels, Keras models and frozen graphs, through tf2onnx.

Every source becomes a ``TensorFlowFunction``, which is traced for the declared inputs. The trace is the reference; its
frozen graph is exported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tf2onnx import tf_loader

from penstock.engines.custom_ops import run_file
from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, PenstockError, Unsupported
from penstock.offline.convert.base import Axis, ConvertOptions, Exported, FrameworkModel, TensorLink
from penstock.offline.convert.declarations import chosen_outputs, free_axes
from penstock.offline.convert.repairs.graphs import called_python_ops
from penstock.offline.convert.tensorflow import constants, exporter, keras, sources
from penstock.offline.convert.tensorflow import links as linking
from penstock.tensor import Array, Signature, TensorSpec

_RANDOM = (
    "Random",
    "StatelessRandom",
    "ParameterizedTruncatedNormal",
    "TruncatedNormal",
    "Multinomial",
    "StatelessMultinomial",
)
"""Prefixes of the names of operators with random results."""
_PLAIN = tf.compat.v1.ConfigProto()
_PLAIN.graph_options.rewrite_options.disable_meta_optimizer = True  # it removes tensors although they are fetched
_REFUSED = (
    tf.errors.InvalidArgumentError,
    tf.errors.OutOfRangeError,
    tf.errors.UnimplementedError,
    ValueError,
    TypeError,
)


class TensorFlowConverter:
    name = "tensorflow"
    version: str = tf.__version__

    def open(self, source: Any, options: ConvertOptions) -> FrameworkModel:
        if options.ops is not None:
            run_file(options.ops)
        function = _function(source, options)
        specs = sources.declared(function.inputs, options)
        try:
            return _TensorFlowModel(function, specs, options)
        except PenstockError:
            raise
        except Exception as error:
            raise InvalidModel(
                f"TensorFlow cannot trace the model: {sources.reason(error)}", _shapes_hint(specs)
            ) from error


CONVERTER = TensorFlowConverter()


class _TensorFlowModel:
    """A traced function. Its frozen graph is made when it is first needed."""

    def __init__(self, function: sources.TensorFlowFunction, specs: Sequence[Any], options: ConvertOptions) -> None:
        self._function = function
        self._specs = tuple(specs)
        self._options = options
        self._concrete, outputs = self._trace()
        self.signature = Signature(
            tuple(_spec(spec.name, spec) for spec in self._specs),
            tuple(map(_spec, outputs, self._ranked(self._concrete.outputs))),
        )
        self.axes: Mapping[str, tuple[Axis, ...]] = free_axes(self.signature.inputs, options)
        self._graph: Any = None
        self._session: Any = None
        self._renamed: dict[str, str] = {}
        self._tables: Any = None

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for spec in self.signature.inputs:  # TensorFlow accepts some other shapes, too
            if spec.name in inputs:
                spec.check(inputs[spec.name])
        try:
            found = self._concrete(*(tf.constant(inputs[spec.name], spec.dtype) for spec in self._specs))
            return {name: np.array(one.numpy()) for name, one in zip(self.signature.output_names, found, strict=True)}
        except _REFUSED as error:
            raise InvalidInput(f"the model rejects the inputs: {sources.reason(error)}") from error
        except Exception as error:
            raise PenstockError(f"the model failed: {sources.reason(error)}") from error

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        self._freeze()
        wanted = {source: linking.unlinked(source)[0] for source in names}
        found: dict[str, Array] = {}
        feeds = {old: inputs[new] for old, new in self._renamed.items() if new in inputs}
        with contextlib.suppress(tf.errors.OpError, KeyError):
            found = self._session.run(wanted, feeds)
        return {source: linking.relaid(value, source) for source, value in found.items()}

    def export(self, target: Path, opset: int) -> Exported:
        self._freeze()
        names = list(self._renamed)
        count = len(self.signature.inputs)
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(self._graph, name="")
            shapes = {
                tensor.name: tensor.shape.as_list()
                for op in graph.get_operations()
                for tensor in op.outputs
                if tensor.shape.rank is not None and graph.is_fetchable(tensor)
            }
            random = tuple(
                f"{op.type} at {linking.layer_of(op.name)}"
                for op in graph.get_operations()
                if op.type.startswith(_RANDOM)
            )
            arguments = {
                "tf_graph": graph,
                "input_names": names[:count],
                "output_names": names[count:],
                "initialized_tables": self._tables,
            }
            weights, computed = constants.fixed(graph)
            request = exporter.Request(self._renamed, self.signature, self.axes, arguments)
            model = exporter.converted(request, opset)
        exporter.write(model, target)
        links: tuple[TensorLink, ...] = tuple(linking.links(model, shapes, self._renamed))
        return Exported(
            f"tf2onnx {exporter.VERSION}",
            links,
            random,
            weights=weights,
            computed=computed,
            python_ops=called_python_ops(model),
        )

    def close(self) -> None:
        self._concrete = self._graph = None
        if self._session is not None:
            self._session.close()
            self._session = None

    def _trace(self) -> tuple[Any, list[str]]:
        """The concrete function and the names of its outputs. Each output is a tensor of its own, even if it is an input."""
        names: list[str] = []
        specs = [tf.TensorSpec(spec.shape, spec.dtype, f"input_{index}") for index, spec in enumerate(self._specs)]

        def traced(*tensors: Any) -> list[Any]:
            given = {spec.name: tensor for spec, tensor in zip(self._specs, tensors, strict=True)}
            outputs = _kept(self._function.call(given), self._options, list(given))
            names[:] = outputs
            return [tf.identity(tensor) for tensor in outputs.values()]

        if self._function.is_graph:
            return tf.compat.v1.wrap_function(traced, specs), names
        return tf.function(traced, autograph=False).get_concrete_function(*specs), names

    def _ranked(self, outputs: Sequence[Any]) -> list[Any]:
        """``outputs`` with their ranks. The control flow of TensorFlow 1 does not know them, so one call finds them."""
        if all(one.shape.rank is not None for one in outputs):
            return list(outputs)
        zeros = [tf.zeros([2 if size is None else size for size in spec.shape], spec.dtype) for spec in self._specs]
        try:
            found = self._concrete(*zeros)
        except Exception as error:
            raise Unsupported(
                f"the rank of the output is unknown, and a call to find it fails: {sources.reason(error)}",
                "give the sizes of the inputs with --inputs",
            ) from error
        return [
            one if one.shape.rank is not None else tf.TensorSpec([None] * value.shape.rank, value.dtype)
            for one, value in zip(outputs, found, strict=True)
        ]

    def _freeze(self) -> None:
        if self._graph is not None:
            return
        concrete, outputs = self._trace()  # another trace, because freezing removes tables from it
        ours = (
            [tensor.name for tensor in concrete.inputs[: len(self._specs)]],
            [tensor.name for tensor in concrete.outputs],
        )
        with exporter.Trouble():
            self._graph, self._tables = tf_loader.from_trackable(self._function.owner, concrete, *ours, False)
        self._renamed = dict(zip(ours[0] + ours[1], [spec.name for spec in self._specs] + outputs, strict=True))
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(self._graph, name="")
        self._session = tf.compat.v1.Session(graph=graph, config=_PLAIN)


def _function(source: Any, options: ConvertOptions) -> sources.TensorFlowFunction:
    if isinstance(source, Path):
        return _file(source, options)
    if isinstance(source, keras.KerasModel):
        return keras.function_of(source, options)
    if isinstance(source, tf.Module) or callable(source):
        return sources.of_callable(source, options)
    raise InvalidArgument(
        f"a {type(source).__name__} is no TensorFlow model", "give a Keras model, a tf.Module or a tf.function"
    )


def _file(path: Path, options: ConvertOptions) -> sources.TensorFlowFunction:
    if path.is_dir():
        return sources.saved_model(path, options.signature)
    if keras.is_keras(path):
        return keras.function_of(keras.load(path, options.trust_pickle), options)
    if path.name == "saved_model.pb":
        return sources.saved_model(path.parent, options.signature)
    return sources.graph_def(path, options)


def _kept(outputs: Mapping[str, Any], options: ConvertOptions, inputs: Sequence[str]) -> dict[str, Any]:
    """The outputs that the user wants, under names that no input has. Raises InvalidArgument, Unsupported."""
    kept: dict[str, Any] = {}
    for name, value in ((name, outputs[name]) for name in chosen_outputs(options, sorted(outputs))):
        if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
            raise Unsupported(
                f"the output '{name}' is a {type(value).__name__}, which ONNX does not have",
                "return a dense tensor, with to_dense or to_tensor, or leave it out with --outputs",
            )
        kept[f"{name}_output" if name in inputs else name] = tf.convert_to_tensor(value)
    if not kept:
        raise InvalidModel("the model has no outputs", "return a tensor")
    return kept


def _spec(name: str, spec: Any) -> TensorSpec:
    if spec.shape.rank is None:
        raise Unsupported(f"the rank of the output '{name}' is unknown", "give the shapes of the inputs with --inputs")
    return TensorSpec(name, sources.datatype_of(spec), tuple(-1 if size is None else size for size in spec.shape))


def _shapes_hint(specs: Sequence[Any]) -> str:
    declared = " ".join(
        f'--inputs "{spec.name}:{spec.dtype.name}[{",".join("?" if size is None else str(size) for size in spec.shape)}]"'
        for spec in specs
    )
    return f"declare the sizes of the inputs, as in {declared}"
