"""``models`` as SavedModels: folders that TensorFlow writes."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import models
from penstock.artifact import Artifact
from penstock.tensor import DataType

_folder = tempfile.TemporaryDirectory(prefix="saved-models-")
Value = tuple[tuple[int | None, ...], DataType]
_FP32 = DataType.FP32


def _saved(
    function: Callable[..., dict[str, tf.Tensor]], weight: tf.Variable | None = None, **inputs: Value
) -> Artifact:
    module = tf.Module()
    module.weight = weight
    specs = [
        tf.TensorSpec(shape, tf.string if datatype is DataType.BYTES else datatype.dtype, name)
        for name, (shape, datatype) in inputs.items()
    ]
    signature = tf.function(function, input_signature=specs).get_concrete_function()
    path = tempfile.mkdtemp(dir=_folder.name)
    tf.saved_model.save(module, path, signatures={"serving_default": signature})
    return Artifact.from_file(Path(path))


@functools.cache
def identity(datatype: DataType) -> Artifact:
    return _saved(lambda x: {"y": tf.identity(x)}, x=((None, 2), datatype))


@functools.cache
def linear(rows: int = 3, columns: int = 2, seed: int = 0) -> Artifact:
    weight = tf.Variable(models.linear_weight(rows, columns, seed))
    return _saved(lambda x: {"y": x @ weight}, weight, x=((None, rows), _FP32))


def fixed_batch() -> Artifact:
    return _saved(lambda x: {"y": -x}, x=((1, 3), _FP32))


def dynamic_image() -> Artifact:
    return _saved(lambda x: {"y": tf.reduce_mean(x, (2, 3), keepdims=True)}, x=((None, 2, None, None), _FP32))


def sum_and_difference() -> Artifact:
    pair = ((None, 2), _FP32)
    return _saved(lambda a, b: {"sum": a + b, "difference": a - b}, a=pair, b=pair)


def input_as_output() -> Artifact:
    return _saved(lambda x: {"y": tf.nn.relu(x), "x": tf.identity(x)}, x=((None, 2), _FP32))


def unread_input() -> Artifact:
    return _saved(lambda x, unread: {"y": tf.nn.relu(x)}, x=((None, 2), _FP32), unread=((None, 2), _FP32))


def fails_on_odd_batch() -> Artifact:
    return _saved(lambda x: {"y": tf.reshape(x, (-1, 4))}, x=((None, 2), _FP32))


def increment(datatype: DataType) -> Artifact:
    return _saved(lambda x: {"y": x + tf.constant(1, datatype.dtype)}, x=((None,), datatype))


def unknown_operator() -> Artifact:
    saved = saved_model_pb2.SavedModel.FromString(fixed_batch().data)
    for function in saved.meta_graphs[0].graph_def.library.function:
        for node in function.node_def:
            node.op = node.op.replace("Neg", "Frobnicate")
    folder = Path(tempfile.mkdtemp(dir=_folder.name))
    (folder / "saved_model.pb").write_bytes(saved.SerializeToString())
    return Artifact.from_file(folder)
