"""Interfaces of conversion: a ``Converter`` opens a source, and a ``FrameworkModel`` runs and exports the model in its own framework.

::

    source ─ Converter.open ─ FrameworkModel ─ export ─ ONNX ─ repairs ─ parity against FrameworkModel.forward ─ certificate

The tests in ``tests/conformance/converters.py`` check this contract for every converter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from penstock.errors import Unsupported
from penstock.tensor import Array, DataType, Signature

RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators of ONNX with random results."""


class Axis(msgspec.Struct, frozen=True):
    """A free dimension of an input. Axes with the same ``name`` always have the same size."""

    index: int
    name: str
    low: int = 1
    """Smallest size that the source accepts."""
    high: int = 0
    """Largest size that the source accepts; 0: no limit is known."""


class InputSpec(msgspec.Struct, frozen=True):
    """An input as the user declares it with ``--inputs``: ``image:float32[N,3,224,224]``."""

    name: str
    datatype: DataType | None
    shape: tuple[int | str, ...] | None
    """Sizes; a name stands for a free dimension. None: unknown."""


class ConvertOptions(msgspec.Struct, frozen=True):
    """Options of a conversion that describe the source. Each converter uses only some of them."""

    inputs: tuple[InputSpec, ...] = ()
    sample: Mapping[str, Array] = {}
    """Arrays of one call, by input name. A converter takes names, types and shapes from it."""
    dynamic: Mapping[str, Mapping[int, str]] = {}
    """Free dimensions: input name -> axis -> name of the dimension."""
    opset: int = 21
    outputs: tuple[str, ...] = ()
    """Names of the outputs to keep. Empty: all."""
    weights: Path | None = None
    """File with the weights, for sources that keep them apart."""
    trust_pickle: bool = False
    """Load formats that can run code. Even then, only names on an allow-list are unpickled."""
    ops: Path | None = None
    """Python file with ``@penstock.register_op`` definitions."""
    signature: str = ""
    """The signature of a SavedModel. Empty: ``serving_default``, or the first."""


class TensorLink(msgspec.Struct, frozen=True):
    """Says which tensor of the ONNX model equals which value of the source."""

    tensor: str
    """Name of the tensor in the ONNX model."""
    source: str
    """Name of the value in the source, which ``FrameworkModel.values`` takes."""
    where: str = ""
    """The line of the user's source code, or the layer, that makes the value; empty if unknown."""
    is_compared: bool = False
    """Compare the value in the calls of ``Probing``, because the outputs hide differences, as a sigmoid does far from 0."""


class Probes(msgspec.Struct, frozen=True):
    """Calls that are hard to convert."""

    calls: tuple[dict[str, Array], ...] = ()
    notes: tuple[str, ...] = ()
    """What the calls leave out, for the certificate."""


class Exported(msgspec.Struct, frozen=True):
    """The result of an export."""

    exporter: str
    """The exporter that succeeded, with its version, as in ``torch.onnx dynamo 2.13.0``."""
    links: tuple[TensorLink, ...] = ()
    """In the order of execution."""
    random: tuple[str, ...] = ()
    """Operators that give random results, with their places. Outputs that depend on them are not compared."""
    warnings: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    """Names of weights, which ``FrameworkModel.values`` gives without inputs. A tensor of the model with the name of one is this
    weight, unless a batch normalisation was folded into it."""
    computed: tuple[str, ...] | None = None
    """Names of all values that the source computes from weights alone, which exporters may fold. ``FrameworkModel.values`` gives them
    without inputs, too. Values that are only parts of weights in another order count as weights. None: unknown."""
    has_parts: bool = False
    """True if ``FrameworkModel.values`` also takes intermediate values, by their names, in place of the inputs before them."""
    python_ops: tuple[str, ...] = ()
    """Names of the operators in Python that the model needs."""


class UnsupportedOperator(msgspec.Struct, frozen=True):
    """An operator that no exporter converts."""

    op: str
    where: str
    """Layer, node or line of source code that uses it."""
    way_out: str
    """What the user can do, as one sentence."""


class UnsupportedOperators(Unsupported):
    """Some operators of the source cannot be converted. ``operators`` lists all of them."""

    operators: tuple[UnsupportedOperator, ...] = ()

    @classmethod
    def of(cls, operators: Sequence[UnsupportedOperator]) -> UnsupportedOperators:
        listed = "; ".join(f"{one.op} at {one.where}" if one.where else one.op for one in operators)
        error = cls(f"{len(operators)} operator(s) cannot be converted: {listed}", operators[0].way_out)
        error.operators = tuple(operators)
        return error


@runtime_checkable
class FrameworkModel(Protocol):
    """A model that its framework has loaded. One thread may use it at a time."""

    signature: Signature
    """Inputs and outputs under the names that the ONNX model will have; -1 for free dimensions."""
    axes: Mapping[str, tuple[Axis, ...]]
    """The free dimensions of each input."""

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs in inference mode, by name. Raises InvalidInput if the model rejects the inputs, PenstockError if it fails."""
        ...

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """Intermediate values of one call, by their ``TensorLink.source``. Values that cannot be had are left out."""
        ...

    def export(self, target: Path, opset: int) -> Exported:
        """Write the ONNX model to ``target``, with external data beside it beyond 2 GiB. Raises UnsupportedOperators, Unsupported."""
        ...

    def close(self) -> None:
        """Release the memory. Idempotent."""
        ...


@runtime_checkable
class Probing(Protocol):
    """A ``FrameworkModel`` that knows inputs that are hard to convert, such as the thresholds of its trees, or its categories."""

    def probes(self, seed: int, *, brief: bool = False) -> Probes:
        """Calls to compare in addition to those that follow from ``signature``.

        With ``brief``, they need not reach every threshold and leaf of trees, because their arrays are equal to the model's.
        """
        ...


class Converter(Protocol):
    """Opens the sources of one framework. ``registry.py`` describes each converter without importing it."""

    name: str
    version: str
    """Version of the framework."""

    def open(self, source: Any, options: ConvertOptions) -> FrameworkModel:
        """Load ``source``, a path or an object of the framework.

        Raises InvalidModel if the file is broken, InvalidArgument if ``options`` do not fit or are missing (the hint then shows the
        ``--inputs`` to type), PermissionDenied if loading can run code and ``trust_pickle`` is false.
        """
        ...
