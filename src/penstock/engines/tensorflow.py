"""TensorFlow: runs SavedModels. Extra ``penstock[tensorflow]``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import tensorflow as tf

from penstock.artifact import Artifact, Format
from penstock.engines.base import LoadedModel, Options, OptionsEngine, check_artifact, refuse_errors, typed_options
from penstock.errors import InvalidConfig, InvalidModel, PenstockError, Unavailable, Unsupported
from penstock.tensor import Array, DataType, Signature, TensorSpec


class TensorFlowOptions(msgspec.Struct, frozen=True):
    """Options of a SavedModel."""

    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Threads within an operator; 0: one per core. All models of a process share one thread pool. The first load determines its
    size.
    """
    signature: str = "serving_default"
    """Name of the model's signature to run."""


class TensorFlowEngine(OptionsEngine):
    """Loads SavedModels from their folders."""

    name = "tensorflow"
    version: str = tf.__version__
    formats = frozenset({Format.SAVED_MODEL})
    options = TensorFlowOptions
    copies = 4  # variables as restored, as read from the file, and as packed by oneDNN
    fixed_bytes = 256 << 20

    def load(self, artifact: Artifact, options: Options) -> LoadedModel:
        typed = typed_options(self.name, options, TensorFlowOptions)
        refuse_errors(check_artifact(artifact, self.formats))
        if typed.threads:
            with contextlib.suppress(RuntimeError):  # raised if a model was loaded before
                tf.config.threading.set_intra_op_parallelism_threads(typed.threads)
        try:
            with artifact.on_disk() as path:
                assert path is not None
                model = tf.saved_model.load(str(path.parent))
        except Exception as error:
            raise InvalidModel(f"TensorFlow refuses the model: {_reason(error)}", "save the model again") from error
        if typed.signature not in model.signatures:
            raise InvalidConfig(
                f"the model has no signature '{typed.signature}'",
                f"its signatures: {', '.join(model.signatures) or 'none'}",
            )
        return TensorFlowModel(model, model.signatures[typed.signature])


class TensorFlowModel(LoadedModel):
    """One signature of a loaded SavedModel. TensorFlow allows concurrent calls."""

    reentrant = True

    def __init__(self, model: Any, function: Any) -> None:
        inputs, outputs = function.structured_input_signature[1], function.structured_outputs
        # TensorFlow does not order the tensors of a signature.
        self.signature = Signature(
            tuple(_spec(name, inputs[name]) for name in sorted(inputs)),
            tuple(_spec(name, outputs[name]) for name in sorted(outputs)),
        )
        # The function does not keep the variables of its model alive.
        self._loaded: tuple[Any, Any] | None = (model, function)

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        loaded = self._loaded
        if loaded is None:
            raise Unavailable("the model has been unloaded")
        try:
            feeds = {name: tf.constant(array) for name, array in inputs.items()}
            found = loaded[1](**feeds)
            # Copies are needed, because a result may share memory with an input or a variable.
            return {name: np.array(found[name].numpy()) for name in self.signature.output_names}
        except Exception as error:
            raise PenstockError(f"the model failed: {_reason(error)}") from error

    def unload(self) -> None:
        self._loaded = None


def _spec(name: str, spec: Any) -> TensorSpec:
    if spec.shape.rank is None:
        raise Unsupported(f"'{name}' has an unknown rank", "save the model with shapes; use None for a free dimension")
    datatype = DataType.BYTES if spec.dtype == tf.string else DataType.from_numpy(np.dtype(spec.dtype.as_numpy_dtype))
    return TensorSpec(name, datatype, tuple(-1 if dim is None else dim for dim in spec.shape))


def _reason(error: Exception) -> str:
    """The line of the error that gives the reason: usually the first line. If the first line only says that the graph failed, the
    last line without a node's name is used.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" \t[")] or [type(error).__name__]
    told = [line for line in lines if not line.startswith("[[")]
    return (told[-1] if lines[0].startswith("Graph execution error") else lines[0])[:400]
