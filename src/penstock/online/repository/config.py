"""A model's configuration, typed: what Penstock acts on of Triton's ``ModelConfig``, under Triton's names.

Files and clients give it in Triton's schema, and ``penstock.online.repository.triton`` alone reads and writes that; its rules check
the bounds. The same type holds what a user has written and the completed configuration of a loaded model, which leaves nothing open.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.online.scheduler.batching_config import DynamicBatching
from penstock.tensor import DataType, Signature, TensorSpec


class TensorReshape(msgspec.Struct, frozen=True):
    """The shape that the model sees instead of ``dims``."""

    shape: tuple[int, ...] = ()


class TensorConfig(msgspec.Struct, frozen=True):
    """One input or output, as clients see it."""

    name: str = ""
    data_type: DataType | None = None
    """None: as the model has it."""
    dims: tuple[int, ...] = ()
    """Without the batch dimension if requests are merged; -1 is any size. Empty: as the model has it."""
    reshape: TensorReshape | None = None
    optional: bool = False
    """Inputs only: whether a request may leave it out."""
    allow_ragged_batch: bool = False
    """Inputs only: whether requests of different shapes are joined element by element."""
    label_filename: str = ""
    """Outputs only: the file with the names of its classes, one a line."""

    @property
    def model_dims(self) -> tuple[int, ...]:
        """The dimensions that the model sees, without that of the batch."""
        return self.dims if self.reshape is None else self.reshape.shape


class BatchTensor(msgspec.Struct, frozen=True):
    """A ``batch_input``, which the server makes from the batch, or a ``batch_output``, which it divides by an input's shapes."""

    kind: str = "BATCH_ELEMENT_COUNT"
    target_name: tuple[str, ...] = ()
    data_type: DataType | None = None
    source_input: tuple[str, ...] = ()
    """Exactly one."""


class RateLimiterResource(msgspec.Struct, frozen=True):
    name: str
    count: int = 0


class RateLimiting(msgspec.Struct, frozen=True):
    """What one instance holds while it runs."""

    resources: tuple[RateLimiterResource, ...] = ()
    priority: int = 0
    """An instance of priority n runs 1/n as often as one of priority 1; 0 counts as 1."""


class InstanceGroup(msgspec.Struct, frozen=True):
    """Instances that are alike."""

    count: int = 0
    """0 counts as 1."""
    rate_limiter: RateLimiting | None = None


class VersionPolicy(msgspec.Struct, frozen=True):
    """Which versions are served; ``all`` goes before ``specific``, and that before ``latest``."""

    latest: int = 1
    """How many of the greatest numbers."""
    all: bool = False
    specific: tuple[int, ...] | None = None


class Optimization(msgspec.Struct, frozen=True):
    graph_level: int = 0
    accelerators: tuple[str, ...] = ()
    """Names of execution accelerators for the CPU."""


class SequenceControl(msgspec.Struct, frozen=True):
    """What a control input tells, and the values for false and true; exactly one of the pairs is given, or a ``data_type``."""

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
    """Exactly one."""


class InitialState(msgspec.Struct, frozen=True):
    dims: tuple[int, ...] = ()
    data_file: str = ""
    """In folder ``initial_state`` of the model; empty: zeros."""


class SequenceState(msgspec.Struct, frozen=True):
    """An output that is the input of the sequence's next request."""

    input_name: str = ""
    output_name: str = ""
    data_type: DataType | None = None
    dims: tuple[int, ...] = ()
    initial_state: tuple[InitialState, ...] = ()
    """At most one."""


class DirectStrategy(msgspec.Struct, frozen=True):
    """Each sequence has a row of the batch for itself."""

    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0
    """From 0 to 1: the share of rows for which a batch is delayed."""


class OldestStrategy(msgspec.Struct, frozen=True):
    """Batches are made from the sequences that wait longest."""

    max_candidate_sequences: int = 0
    """Most sequences under way on one instance; 0: ``max_batch_size``."""
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


class SequenceBatching(msgspec.Struct, frozen=True):
    """The requests of a sequence go to one instance, in order."""

    direct: DirectStrategy | None = None
    oldest: OldestStrategy | None = None
    """If both are None, ``direct`` with its defaults."""
    max_sequence_idle_microseconds: int = 0
    """A sequence without requests for longer has ended."""
    control_input: tuple[ControlInput, ...] = ()
    state: tuple[SequenceState, ...] = ()
    iterative_sequence: bool = False


class EnsembleStep(msgspec.Struct, frozen=True):
    """A request to another model."""

    model_name: str = ""
    model_version: int = 0
    """0 and -1: the server chooses."""
    model_namespace: str = ""
    input_map: Mapping[str, str] = {}
    """By the model's input the ensemble's tensor."""
    output_map: Mapping[str, str] = {}
    """By the model's output the ensemble's tensor."""

    @property
    def key(self) -> tuple[str, str]:
        """Name and version of the model; models of one name in several repositories are known as ``repository/name``."""
        name = f"{self.model_namespace}/{self.model_name}" if self.model_namespace else self.model_name
        return name, str(self.model_version) if self.model_version > 0 else ""


class EnsembleScheduling(msgspec.Struct, frozen=True):
    step: tuple[EnsembleStep, ...] = ()
    max_inflight_requests: int = 0
    """0: no limit."""


class WarmUpInput(msgspec.Struct, frozen=True):
    """Zeros, unless it is random or comes from a file."""

    data_type: DataType
    dims: tuple[int, ...] = ()
    random_data: bool = False
    input_data_file: str | None = None
    """In folder ``warmup`` of the model."""


class WarmUpRequest(msgspec.Struct, frozen=True):
    """A request that is run before the model is ready."""

    name: str = ""
    batch_size: int = 0
    """0 counts as 1."""
    inputs: Mapping[str, WarmUpInput] = {}
    count: int = 0
    """How often; 0 counts as 1."""


class ModelConfig(msgspec.Struct, frozen=True):
    """See the module."""

    name: str = ""
    platform: str = ""
    backend: str = ""
    default_model_filename: str = ""
    max_batch_size: int | None = None
    """0: requests are not merged; None: as the model can."""
    input: tuple[TensorConfig, ...] = ()
    output: tuple[TensorConfig, ...] = ()
    batch_input: tuple[BatchTensor, ...] = ()
    batch_output: tuple[BatchTensor, ...] = ()
    version_policy: VersionPolicy = VersionPolicy()
    instance_group: tuple[InstanceGroup, ...] = ()
    dynamic_batching: DynamicBatching | None = None
    """At most one of this and the next two is given."""
    sequence_batching: SequenceBatching | None = None
    ensemble_scheduling: EnsembleScheduling | None = None
    model_warmup: tuple[WarmUpRequest, ...] = ()
    optimization: Optimization | None = None
    parameters: Mapping[str, str] = {}
    """Words for the engine or the model."""
    metric_tags: Mapping[str, str] = {}
    """Labels that its metrics carry."""
    decoupled: bool = False
    """Whether a request has any number of responses."""
    response_cache: bool = False
    """Whether responses to equal requests may come from the cache."""
    lasting: bytes = b""
    """Identifies all that can only be changed by loading the model again; equal for configurations that differ in the rest."""
    wire: bytes = b""
    """The whole in Triton's schema, with the fields that Penstock does not act on; see ``triton.schema``."""

    @property
    def batchable(self) -> bool:
        """Whether requests are known to have a batch dimension."""
        return bool(self.max_batch_size)

    @property
    def max_rows(self) -> int:
        """Most rows of a merged batch; 1 if nothing is merged."""
        return self.max_batch_size or 1

    @property
    def instances(self) -> int:
        """How many instances it asks for; 0 if it leaves that open."""
        return sum(max(1, group.count) for group in self.instance_group)

    @property
    def steps(self) -> tuple[EnsembleStep, ...]:
        """Those of an ensemble; no other model has any."""
        return self.ensemble_scheduling.step if self.ensemble_scheduling else ()

    @property
    def client_signature(self) -> Signature:
        """What clients send and get, by a completed configuration: with the batch dimension where requests are merged, before any
        ``reshape``, and without the inputs that the server makes."""
        return Signature(*(tuple(_spec(self, one, one.dims) for one in part) for part in (self.input, self.output)))

    @property
    def model_signature(self) -> Signature:
        """As ``client_signature``, after every ``reshape``."""
        return Signature(
            *(tuple(_spec(self, one, one.model_dims) for one in part) for part in (self.input, self.output))
        )


def _spec(config: ModelConfig, tensor: TensorConfig, dims: tuple[int, ...]) -> TensorSpec:
    assert tensor.data_type is not None, "the configuration is not complete"
    return TensorSpec(tensor.name, tensor.data_type, (-1, *dims) if config.batchable else dims)
