"""An ONNX model as the source of a conversion, computed with other rounding than ONNX Runtime's, to test parity itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.errors import InvalidInput, PenstockError
from penstock.offline.convert.base import Axis, Exported, TensorLink
from penstock.offline.convert.parity.bodies import How
from penstock.offline.convert.parity.nodes import Nodes
from penstock.offline.convert.parity.tolerance import UNITS
from penstock.offline.sessions import signature_of
from penstock.tensor import Array, Signature

_UNITS = 1.0
"""Rounding error of each node, in units in the last place."""


class OnnxSource:
    """Runs ``proto`` node by node in double precision, and rounds every value with a random error of a few units. Implements
    ``FrameworkModel``."""

    axes: Mapping[str, tuple[Axis, ...]]

    def __init__(self, artifact: Artifact, proto: onnx.ModelProto, seed: int = 0, units: float = _UNITS) -> None:
        self._nodes, self._artifact, self._units = Nodes(proto), artifact, units
        self._rng = np.random.default_rng(seed)
        self.signature: Signature = signature_of(artifact)
        self.axes = {}
        for value in proto.graph.input:
            dims = value.type.tensor_type.shape.dim
            self.axes[value.name] = tuple(
                Axis(index, dim.dim_param) for index, dim in enumerate(dims) if not dim.HasField("dim_value")
            )

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._run(inputs, self.signature.output_names)

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        return self._run(inputs, names)

    def export(self, target: Path, opset: int) -> Exported:
        target.write_bytes(self._artifact.data)
        return self.exported

    @property
    def exported(self) -> Exported:
        graph = self._nodes.proto.graph
        links = [TensorLink(name, name, f"layer {name}") for node in graph.node for name in node.output if name]
        return Exported("onnx", tuple(links))

    def close(self) -> None:
        pass

    def _run(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        state = self._rng.bit_generator.state  # so that the same call gives the same values
        try:
            with np.errstate(all="ignore"):
                found = self._nodes.run(inputs, names, precise=True, noise=self._round)
        except PenstockError as error:
            raise InvalidInput(error.message) from None
        finally:
            self._rng.bit_generator.state = state
        return {
            name: value.astype(self._type(name)) if value.dtype == np.float64 else value
            for name, value in found.items()
            if isinstance(value, np.ndarray)
        }

    def _round(self, name: str, value: Array, how: How) -> Array:
        if how != "inexact" or value.dtype != np.float64:
            return value
        kind = self._type(name)
        is_exact = value == value.astype(kind if kind.itemsize < 4 else np.float32)
        error = 1.0 + self._units * UNITS[kind] * self._rng.standard_normal(value.shape)
        return np.asarray(np.where(is_exact, value, (value * error).astype(kind).astype(np.float64)))

    def _type(self, name: str) -> np.dtype[np.generic]:
        found: np.dtype[np.generic] = self._nodes.float_types.get(name, np.dtype(np.float32))
        return found
