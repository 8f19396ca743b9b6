"""Converts a completed configuration into the scheduler's settings: batching, sequences, and the layout of batches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, InvalidConfig
from penstock.online.repository.config import (
    ControlInput,
    DirectStrategy,
    ModelConfig,
    OldestStrategy,
    SequenceBatching,
    SequenceState,
    TensorConfig,
)
from penstock.online.repository.triton.rules import prefix, prefixed
from penstock.online.scheduler.batching_config import BatchingConfig, DynamicBatching
from penstock.online.scheduler.layout import (
    BatchLayout,
    MadeInput,
    MergedRows,
    Reshape,
    Shape,
    ShapedRequests,
    SingleRequest,
)
from penstock.online.scheduler.sequences.batcher import SequencingConfig
from penstock.online.scheduler.sequences.controls import Control, ControlKind
from penstock.online.scheduler.sequences.implicit_state import ImplicitState
from penstock.tensor import DataType, Signature, TensorSpec, element_count, from_wire

_MAX_SLOTS = 1 << 16
_MAX_BYTES = 1 << 30


def batching(config: ModelConfig, max_queue: int) -> BatchingConfig:
    """The batching settings of a model. ``max_queue`` limits the requests that are not answered yet. Raises InvalidConfig."""
    wanted = config.dynamic_batching or DynamicBatching()
    fields = msgspec.structs.asdict(wanted) | {"preferred_batch_size": tuple(sorted(wanted.preferred_batch_size))}
    with prefixed(prefix(config.name)):
        return _batching(config, max_queue, instances=config.instances, **fields)


def _batching(config: ModelConfig, max_queue: int, **fields: Any) -> BatchingConfig:
    return BatchingConfig(
        batchable=config.batchable,
        max_batch=config.max_rows,
        max_queue=max_queue,
        decoupled=config.decoupled,
        **fields,
    )


def sequencing(
    config: ModelConfig, signature: Signature, folder: Path, max_queue: int, *, merges: bool = True
) -> SequencingConfig:
    """The settings for the sequences of a model. ``merges`` is true if the model receives merged requests.

    ``signature`` is the signature of the loaded model. Reads initial states from files in ``folder``. Raises InvalidConfig.
    """
    wanted, max_batch = config.sequence_batching or SequenceBatching(), config.max_rows
    fixed, first = merges and wanted.oldest is None, (1,) if config.batchable else ()
    slots = (wanted.oldest and wanted.oldest.max_candidate_sequences) or max_batch
    with prefixed(prefix(config.name)):
        if wanted.iterative_sequence:
            raise InvalidConfig("'sequence_batching.iterative_sequence' is not supported", "remove it")
        if config.decoupled and (fixed or wanted.state):
            raise InvalidConfig(
                "'sequence_batching' of a decoupled model must be 'oldest', without 'state'", "use 'oldest'"
            )
        if slots > _MAX_SLOTS:
            raise InvalidConfig(f"'sequence_batching' allows {slots} active sequences, more than {_MAX_SLOTS}")
        return SequencingConfig(
            batching=_sequence_batches(config, wanted, max_queue),
            slots=slots,
            fixed=fixed,
            idle_us=wanted.max_sequence_idle_microseconds,
            controls=tuple(_control(tensor, signature, first) for tensor in wanted.control_input),
            states=tuple(_state(state, signature, first, folder / "initial_state") for state in wanted.state),
            hidden=frozenset(state.output_name for state in wanted.state) - {output.name for output in config.output},
            instances=config.instances,
        )


def layout_of(config: ModelConfig) -> BatchLayout:
    """The layout of batches. Raises InvalidConfig."""
    tensors = [*config.input, *config.output]
    ragged = frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)
    plain: BatchLayout = MergedRows() if config.batchable and not config.decoupled else SingleRequest()
    if not (ragged or config.batch_input or config.batch_output or any(one.reshape for one in tensors)):
        return plain
    first = (-1,) if config.batchable else ()
    made = [
        MadeInput(
            kind=one.kind,
            targets=one.target_name,
            source=one.source_input[0],
            dtype=np.dtype(np.float32 if one.data_type is DataType.FP32 else np.int32),
        )
        for one in config.batch_input
    ]
    reshapes = _reshapes(config.input, first), _reshapes(config.output, first)
    return ShapedRequests(plain, ragged, *reshapes, made, _scattered(config, first))


def _reshapes(tensors: Iterable[TensorConfig], first: Shape) -> dict[str, Reshape]:
    return {
        tensor.name: Reshape(first + tensor.dims, first + tensor.model_dims) for tensor in tensors if tensor.reshape
    }


def _scattered(config: ModelConfig, first: Shape) -> dict[str, tuple[str, Shape]]:
    outputs = {tensor.name: first + tensor.dims for tensor in config.output}
    ranks = {tensor.name: len(first) + len(tensor.model_dims) for tensor in config.input}
    scattered = {}
    for one in config.batch_output:
        source = one.source_input[0]
        for target in one.target_name:
            if any(want == -1 for want in outputs[target][ranks[source] :]):
                raise InvalidConfig(
                    f"{prefix(config.name)}output '{target}' has more dimensions than input '{source}', from which it takes its shape",
                    "correct 'dims' or 'batch_output'",
                )
            scattered[target] = source, outputs[target]
    return scattered


def _sequence_batches(config: ModelConfig, wanted: SequenceBatching, max_queue: int) -> BatchingConfig:
    max_batch, oldest = config.max_rows, wanted.oldest or OldestStrategy()
    delay_us, preferred = oldest.max_queue_delay_microseconds, sorted(oldest.preferred_batch_size)
    if wanted.oldest is None:
        # As in Triton, a batch leaves the queue when enough slots are ready. Without a minimum, the batch leaves immediately.
        direct = wanted.direct or DirectStrategy()
        least = np.float32(direct.minimum_slot_utilization)
        delay_us = direct.max_queue_delay_microseconds if least else 0
        preferred = [rows for rows in range(1, max_batch + 1) if delay_us and np.float32(rows / max_batch) >= least]
    return _batching(
        config,
        max_queue,
        preferred_batch_size=tuple(preferred),
        max_queue_delay_microseconds=delay_us,
        preserve_ordering=oldest.preserve_ordering,
        stateful=not wanted.state,
    )


def _control(tensor: ControlInput, signature: Signature, first: Shape) -> Control:
    control, name = tensor.control[0], tensor.name
    datatype, false, true = control.values
    is_scalar = any(spec.name == name and len(spec.shape) == len(first) for spec in signature.inputs)
    spec = _spec(signature.inputs, name, datatype, first if is_scalar and first else (*first, 1))
    return Control(name, ControlKind(control.kind), spec.datatype, (1,) * (len(spec.shape) - 1), false, true)


def _state(state: SequenceState, signature: Signature, first: Shape, folder: Path) -> ImplicitState:
    datatype = state.data_type
    assert datatype is not None, "the configuration was not checked"
    _spec(signature.inputs, state.input_name, datatype, (*first, *state.dims))
    output = _spec(signature.outputs, state.output_name, datatype, (*first, *state.dims))
    given = state.initial_state[0] if state.initial_state else None
    row = (*first, *(given.dims if given else [1 if size == -1 else size for size in state.dims]))
    try:
        size = element_count(row) * max(1, datatype.itemsize)
        if size > _MAX_BYTES:
            raise InvalidArgument(f"it takes {size} bytes, more than {_MAX_BYTES}")
        if given and given.data_file:
            # Triton ignores the rest of a longer file.
            data = read_inside(folder, given.data_file, size if datatype.itemsize else _MAX_BYTES)
            return ImplicitState(state.input_name, output, from_wire(data, datatype, row))
    except InvalidArgument as error:
        raise InvalidConfig(
            f"the initial state of '{state.input_name}' is invalid: {error.message}", error.hint
        ) from None
    return ImplicitState(state.input_name, output, np.full(row, 0 if datatype.itemsize else b"", datatype.dtype))


def read_inside(folder: Path, name: str, limit: int) -> bytes:
    """The first ``limit`` bytes of the file ``name`` in ``folder``, which belongs to a model. Raises InvalidArgument."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise InvalidArgument(f"the file '{name}' is outside the model's folder '{folder.name}'")
    if not path.is_file():
        raise InvalidArgument(f"there is no file '{name}'", f"put it into the model's folder '{folder.name}'")
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise InvalidArgument(f"cannot read the file '{name}': {error.strerror}") from None


def _spec(specs: Iterable[TensorSpec], name: str, datatype: DataType | None, shape: Shape) -> TensorSpec:
    """The model's tensor ``name``. Raises InvalidConfig unless the tensor has ``datatype`` and ``shape``."""
    found = next((spec for spec in specs if spec.name == name), None)
    if found is None or found.datatype is not datatype or not found.admits(shape):
        had = "no such tensor" if found is None else f"{found.datatype.value} of {list(found.shape)}"
        wanted = f"{datatype.value if datatype else 'a tensor'} of {list(shape)}"
        raise InvalidConfig(f"'sequence_batching' needs '{name}', {wanted}, but the model has {had}")
    return found
