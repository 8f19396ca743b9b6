"""What is known about a model file. ``penstock inspect --json`` prints these fields."""

from __future__ import annotations

import math

import msgspec

from penstock.offline.convert.certificate import Certificate
from penstock.tensor import DataType, Signature, TensorSpec

_KNOWN_TYPES = {each.value: each for each in DataType}


class TensorFacts(msgspec.Struct, frozen=True):
    """One input or output."""

    name: str
    datatype: str
    """The name of the datatype, such as ``FP32``. A type that no tensor has is written as in ONNX, such as ``seq(tensor(FP32))``."""
    shape: tuple[int, ...] | None
    """-1 stands for any size. None: the file does not contain the shape."""
    role: str = ""
    """What an input seems to mean; empty for outputs."""
    meaning: str = ""
    """The role with its values, and the reason for it."""

    @property
    def spec(self) -> TensorSpec | None:
        """The spec of a tensor; None for another type, or without a shape."""
        datatype = _KNOWN_TYPES.get(self.datatype)
        return None if datatype is None or self.shape is None else TensorSpec(self.name, datatype, self.shape)


class FileFacts(msgspec.Struct, frozen=True):
    """What the file says, without loading the model."""

    inputs: tuple[TensorFacts, ...] = ()
    outputs: tuple[TensorFacts, ...] = ()
    axes: dict[str, tuple[str, ...]] = {}
    """The names of the axes of each input and output. A name is empty if the axis has a fixed size or no name."""
    opsets: dict[str, int] = {}
    """Opset version by domain. The default domain of ONNX is named ``ai.onnx``."""
    operators: dict[str, int] = {}
    """Number of operators by name, most frequent first; subgraphs and functions included."""
    parameters: int | None = None
    """Number of weights. None: the file does not say."""
    weight_bytes: int | None = None
    quantised: str = ""
    """How the model is already quantised; empty if it is not."""
    certificate: Certificate | None = None
    """The evidence that the model gives the outputs of the source from which it was converted."""
    notes: tuple[str, ...] = ()

    @property
    def signature(self) -> Signature | None:
        """The signature that the file declares; None if it lacks a type or shape."""
        specs = [one.spec for one in (*self.inputs, *self.outputs)]
        known = tuple(spec for spec in specs if spec is not None)
        if len(known) < len(specs) or not known:
            return None
        return Signature(known[: len(self.inputs)], known[len(self.inputs) :])


class EngineFacts(msgspec.Struct, frozen=True):
    """Whether one engine runs the model."""

    name: str
    runs: bool
    reason: str = ""
    """Why it does not."""
    memory_bytes: int = 0
    """Upper bound on the memory of one loaded copy."""


class CostFacts(msgspec.Struct, frozen=True):
    """The cost of one call, and the part of it that a build can quantise."""

    activation_bytes: int | None = None
    """Memory of the tensors that exist at the same time; None if shapes are unknown."""
    multiply_adds: int | None = None
    """Multiply-add operations of one call; None if shapes are unknown."""
    linear: int = 0
    """Number of Conv, ConvTranspose, Gemm and MatMul operators."""
    quantisable: int = 0
    """How many of them would become INT8."""
    share_of_weights: float = 0.0
    """Share of the weights that they hold."""
    share_of_work: float | None = None
    """Share of the multiply-add operations that they compute; None if shapes are unknown."""
    obstacle: str = ""
    """Why nothing would be quantised."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``penstock inspect`` says about a model."""

    model: str
    format: str
    size_bytes: int
    opsets: dict[str, int]
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    axes: dict[str, tuple[str, ...]]
    operators: dict[str, int]
    parameters: int | None
    weight_bytes: int | None
    quantised: str
    certificate: Certificate | None
    dependent_rows: str
    """Why requests cannot be merged; empty if the rows are proven to be independent."""
    engines: tuple[EngineFacts, ...]
    cost: CostFacts
    has_rows: bool
    """True if the first axis of every input counts samples. Otherwise, a sample is a whole call."""
    sample_shapes: dict[str, tuple[int, ...]]
    """Shapes of the inputs of a call with one sample."""
    sample_failure: str
    """Why the model rejects the samples that were tried; empty if it accepts one, or if no engine runs the model."""
    next_command: str
    """The command to type next; empty if there is none."""
    notes: tuple[str, ...]


def sorted_counts(counts: dict[str, int]) -> dict[str, int]:
    """``counts``, largest first, then by name."""
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def elements(shape: tuple[int, ...]) -> int:
    """The number of elements of a tensor; 0 if a dimension is free."""
    return math.prod(shape) if min(shape, default=0) >= 0 else 0
