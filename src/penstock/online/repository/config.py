"""The typed configuration of a model: the fields of Triton's ``ModelConfig`` that Penstock uses, under Triton's names.

Files and client requests contain configurations in Triton's schema. Only ``penstock.online.repository.triton`` reads and writes
that schema and checks its rules. ``ModelConfig`` represents both the configuration that a user wrote and the completed
configuration of a loaded model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from penstock.online.scheduler.batching_config import DynamicBatching
from penstock.tensor import DataType, Signature, TensorSpec


class TensorReshape(msgspec.Struct, frozen=True):
    """The shape of a tensor for the model. Clients use the shape ``dims``."""

    shape: tuple[int, ...] = ()


class TensorConfig(msgspec.Struct, frozen=True):
    """One input or output, as clients see it."""

    name: str = ""
    data_type: DataType | None = None
    """The data type; None means the data type of the model's tensor."""
    dims: tuple[int, ...] = ()
    """The shape, without the batch dimension if requests are merged. A dimension of -1 may have any size. Empty means the shape of
    the model's tensor."""
    reshape: TensorReshape | None = None
    optional: bool = False
    """Inputs only: True if a request may omit the input."""
    allow_ragged_batch: bool = False
    """Inputs only: True if requests with different shapes are merged by concatenating their elements."""
    label_filename: str = ""
    """Outputs only: a file with the names of the classes, one per line."""

    @property
    def model_dims(self) -> tuple[int, ...]:
        """The dimensions that the model receives, without the batch dimension."""
        return self.dims if self.reshape is None else self.reshape.shape


class BatchTensor(msgspec.Struct, frozen=True):
    """A ``batch_input`` or a ``batch_output``. The server computes a batch input from the batch, and splits a batch output among the
    requests according to the shapes of an input.
    """

    kind: str = "BATCH_ELEMENT_COUNT"
    target_name: tuple[str, ...] = ()
    data_type: DataType | None = None
    source_input: tuple[str, ...] = ()
    """Exactly one entry."""


class RateLimiterResource(msgspec.Struct, frozen=True):
    name: str
    count: int = 0


class RateLimiting(msgspec.Struct, frozen=True):
    """The resources that one instance holds while it runs."""

    resources: tuple[RateLimiterResource, ...] = ()
    priority: int = 0
    """An instance of priority n runs 1/n as often as an instance of priority 1; 0 counts as 1."""


class InstanceGroup(msgspec.Struct, frozen=True):
    """A group of instances with the same settings."""

    count: int = 0
    """0 counts as 1."""
    rate_limiter: RateLimiting | None = None


class VersionPolicy(msgspec.Struct, frozen=True):
    """The versions to serve. ``all`` takes precedence over ``specific``, and ``specific`` over ``latest``."""

    latest: int = 1
    """Number of versions to serve, starting with the greatest version number."""
    all: bool = False
    specific: tuple[int, ...] | None = None


class Optimization(msgspec.Struct, frozen=True):
    graph_level: int = 0
    accelerators: tuple[str, ...] = ()
    """Names of execution accelerators for the CPU."""


class SequenceControl(msgspec.Struct, frozen=True):
    """The meaning of a control input. Besides ``kind``, exactly one field is set. Each pair has the values for false and true."""

    kind: str = "CONTROL_SEQUENCE_START"
    int32_false_true: tuple[int, ...] = ()
    fp32_false_true: tuple[float, ...] = ()
    bool_false_true: tuple[bool, ...] = ()
    data_type: DataType | None = None

    @property
    def values(self) -> tuple[DataType | None, float, float]:
        """The datatype, and the values for false and true."""
        given = (
            (DataType.INT32, self.int32_false_true),
            (DataType.FP32, self.fp32_false_true),
            (DataType.BOOL, self.bool_false_true),
        )
        return next(((datatype, *pair) for datatype, pair in given if pair), (self.data_type, 0, 1))


class ControlInput(msgspec.Struct, frozen=True):
    name: str = ""
    control: tuple[SequenceControl, ...] = ()
    """Exactly one entry."""


class InitialState(msgspec.Struct, frozen=True):
    dims: tuple[int, ...] = ()
    data_file: str = ""
    """A file in the model's folder ``initial_state``. If empty, the state is initially zero."""


class SequenceState(msgspec.Struct, frozen=True):
    """An output that is passed as an input to the next request of the sequence."""

    input_name: str = ""
    output_name: str = ""
    data_type: DataType | None = None
    dims: tuple[int, ...] = ()
    initial_state: tuple[InitialState, ...] = ()
    """At most one entry."""


class DirectStrategy(msgspec.Struct, frozen=True):
    """Strategy in which each sequence has its own row of the batch."""

    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0
    """Fraction of a batch's rows (0 to 1) that must be filled before the batch runs."""


class OldestStrategy(msgspec.Struct, frozen=True):
    """Strategy in which batches are formed from the sequences that have waited longest."""

    max_candidate_sequences: int = 0
    """Maximum number of active sequences on one instance; 0 means ``max_batch_size``."""
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


class SequenceBatching(msgspec.Struct, frozen=True):
    """Settings of sequence batching, in which all requests of a sequence go to the same instance, in order."""

    direct: DirectStrategy | None = None
    oldest: OldestStrategy | None = None
    """If both are None, ``direct`` is used with its defaults."""
    max_sequence_idle_microseconds: int = 0
    """A sequence ends after this number of microseconds without requests."""
    control_input: tuple[ControlInput, ...] = ()
    state: tuple[SequenceState, ...] = ()
    iterative_sequence: bool = False


class EnsembleStep(msgspec.Struct, frozen=True):
    """A step of an ensemble: a request to another model."""

    model_name: str = ""
    model_version: int = 0
    """The version of the model. With 0 or -1, the server chooses the version."""
    model_namespace: str = ""
    input_map: Mapping[str, str] = {}
    """For each input of the model, the name of the ensemble's tensor."""
    output_map: Mapping[str, str] = {}
    """For each output of the model, the name of the ensemble's tensor."""

    @property
    def key(self) -> tuple[str, str]:
        """Name and version of the model. With namespaces, the name is ``namespace/name``."""
        name = f"{self.model_namespace}/{self.model_name}" if self.model_namespace else self.model_name
        return name, str(self.model_version) if self.model_version > 0 else ""


class EnsembleScheduling(msgspec.Struct, frozen=True):
    step: tuple[EnsembleStep, ...] = ()
    max_inflight_requests: int = 0
    """Maximum number of requests in progress; 0 means no limit."""


class WarmUpInput(msgspec.Struct, frozen=True):
    """The content of one input: zeros, random values, or data from a file."""

    data_type: DataType
    dims: tuple[int, ...] = ()
    random_data: bool = False
    input_data_file: str | None = None
    """A file in the model's folder ``warmup``."""


class WarmUpRequest(msgspec.Struct, frozen=True):
    """A request that the server runs before the model is ready."""

    name: str = ""
    batch_size: int = 0
    """0 counts as 1."""
    inputs: Mapping[str, WarmUpInput] = {}
    count: int = 0
    """Number of repetitions; 0 counts as 1."""


class ModelConfig(msgspec.Struct, frozen=True):
    """The configuration of a model, either as the user wrote it or completed from the loaded model."""

    name: str = ""
    platform: str = ""
    backend: str = ""
    default_model_filename: str = ""
    max_batch_size: int | None = None
    """Maximum rows of a batch. With 0, requests are not merged. With None, the model decides."""
    input: tuple[TensorConfig, ...] = ()
    output: tuple[TensorConfig, ...] = ()
    batch_input: tuple[BatchTensor, ...] = ()
    batch_output: tuple[BatchTensor, ...] = ()
    version_policy: VersionPolicy = VersionPolicy()
    instance_group: tuple[InstanceGroup, ...] = ()
    dynamic_batching: DynamicBatching | None = None
    """At most one of ``dynamic_batching``, ``sequence_batching`` and ``ensemble_scheduling`` is set."""
    sequence_batching: SequenceBatching | None = None
    ensemble_scheduling: EnsembleScheduling | None = None
    model_warmup: tuple[WarmUpRequest, ...] = ()
    optimization: Optimization | None = None
    parameters: Mapping[str, str] = {}
    """Options of the engine or the model."""
    metric_tags: Mapping[str, str] = {}
    """Additional labels of the model's metrics."""
    decoupled: bool = False
    """True if a request may have any number of responses."""
    response_cache: bool = False
    """True if responses to equal requests may come from the cache."""
    lasting: bytes = b""
    """Digest of the settings that only a reload can change."""
    wire: bytes = b""
    """The serialized configuration in Triton's schema, including the fields that Penstock does not use."""

    @property
    def batchable(self) -> bool:
        """True if requests are known to have a batch dimension."""
        return bool(self.max_batch_size)

    @property
    def max_rows(self) -> int:
        """Maximum rows of a merged batch; 1 if requests are not merged."""
        return self.max_batch_size or 1

    @property
    def instances(self) -> int:
        """The configured number of instances; 0 if none is configured."""
        return sum(max(1, group.count) for group in self.instance_group)

    @property
    def steps(self) -> tuple[EnsembleStep, ...]:
        """The steps of an ensemble; empty for other models."""
        return self.ensemble_scheduling.step if self.ensemble_scheduling else ()

    @property
    def client_signature(self) -> Signature:
        """The tensors that clients send and receive, from a completed configuration.

        Shapes include the batch dimension if requests are merged. Inputs that the server creates are left out, and no ``reshape`` is
        applied.
        """
        return self._signature(lambda tensor: tensor.dims)

    @property
    def model_signature(self) -> Signature:
        """``client_signature`` with every ``reshape`` applied."""
        return self._signature(lambda tensor: tensor.model_dims)

    def _signature(self, dims_of: Callable[[TensorConfig], tuple[int, ...]]) -> Signature:
        def spec(tensor: TensorConfig) -> TensorSpec:
            assert tensor.data_type is not None, "the configuration is not complete"
            return TensorSpec(tensor.name, tensor.data_type, (-1,) * self.batchable + dims_of(tensor))

        return Signature(tuple(map(spec, self.input)), tuple(map(spec, self.output)))
