"""What a configuration's ``sequence_batching`` asks of the scheduler, held against the model, with the initial states read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from penstock.errors import InvalidArgument, InvalidConfig
from penstock.online.repository.triton.rules import DATATYPES
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.sequences.batcher import SequencingConfig
from penstock.online.scheduler.sequences.controls import Control, Kind
from penstock.online.scheduler.sequences.implicit_state import State
from penstock.protocol.messages import Message, ModelSequenceBatching
from penstock.tensor import DataType, Signature, TensorSpec, element_count, from_wire

_MAX_SLOTS = 1 << 16
_MAX_BYTES = 1 << 30
_FLAGS = {"int32_false_true": DataType.INT32, "fp32_false_true": DataType.FP32, "bool_false_true": DataType.BOOL}


def sequencing(
    config: Message, signature: Signature, folder: Path, max_queue: int, *, merges: bool = True
) -> SequencingConfig:
    """How the sequences of a model are served, which ``merges`` requests or is given each by itself. ``config`` is its effective
    configuration, already checked by itself, ``signature`` the model's own, ``folder`` where its files lie, and ``max_queue`` as of
    ``model_config.batching``. Reads files. Raises InvalidConfig, which names model and field."""
    wanted, max_batch = config.sequence_batching, max(1, config.max_batch_size)
    fixed, first = merges and not wanted.HasField("oldest"), (1,) if config.max_batch_size > 0 else ()
    slots = wanted.oldest.max_candidate_sequences or max_batch
    try:
        if wanted.iterative_sequence:
            raise InvalidConfig("'sequence_batching.iterative_sequence' is not supported", "leave it out")
        if config.model_transaction_policy.decoupled and (fixed or wanted.state):
            raise InvalidConfig("'sequence_batching' of a decoupled model can only be 'oldest', without 'state'")
        if slots > _MAX_SLOTS:
            raise InvalidConfig(f"'sequence_batching' has {slots} sequences under way, and at most {_MAX_SLOTS} can be")
        return SequencingConfig(
            batching=_batching(config, max_batch, max_queue),
            slots=slots,
            fixed=fixed,
            idle_us=wanted.max_sequence_idle_microseconds,
            controls=tuple(
                _control(tensor.name, tensor.control[0], signature, first) for tensor in wanted.control_input
            ),
            states=tuple(_state(state, signature, first, folder / "initial_state") for state in wanted.state),
            hidden=frozenset(state.output_name for state in wanted.state) - {output.name for output in config.output},
            instances=sum(group.count for group in config.instance_group),
        )
    except InvalidConfig as error:
        raise InvalidConfig(f"model '{config.name}': {error.message}", error.hint) from None


def _batching(config: Message, max_batch: int, max_queue: int) -> BatchingConfig:
    wanted = config.sequence_batching
    delay_us = wanted.oldest.max_queue_delay_microseconds
    preferred = sorted(wanted.oldest.preferred_batch_size)
    if not wanted.HasField("oldest"):
        # A batch leaves when enough slots are ready, as Triton reckons. Without a share to wait for, nothing is waited for.
        least = np.float32(wanted.direct.minimum_slot_utilization)
        delay_us = wanted.direct.max_queue_delay_microseconds if least else 0
        preferred = [rows for rows in range(1, max_batch + 1) if delay_us and np.float32(rows / max_batch) >= least]
    return BatchingConfig(
        batchable=config.max_batch_size > 0,
        max_batch=max_batch,
        max_queue=max_queue,
        preferred_batch_size=tuple(preferred),
        max_queue_delay_microseconds=delay_us,
        preserve_ordering=wanted.oldest.preserve_ordering,
        decoupled=config.model_transaction_policy.decoupled,
        stateful=not wanted.state,
    )


def _control(name: str, control: Message, signature: Signature, first: tuple[int, ...]) -> Control:
    kind = Kind(ModelSequenceBatching.Control.Kind.Name(control.kind))
    given = [(datatype, getattr(control, field)) for field, datatype in _FLAGS.items() if getattr(control, field)]
    datatype, (false, true) = given[0] if given else (DATATYPES[control.data_type], (0, 1))
    is_scalar = any(spec.name == name and len(spec.shape) == len(first) for spec in signature.inputs)
    shape = _spec(signature.inputs, name, datatype, first if is_scalar and first else (*first, 1)).shape
    return Control(name, kind, datatype, (1,) * (len(shape) - 1), false, true)


def _state(state: Message, signature: Signature, first: tuple[int, ...], folder: Path) -> State:
    datatype = DATATYPES[state.data_type]
    _spec(signature.inputs, state.input_name, datatype, (*first, *state.dims))
    output = _spec(signature.outputs, state.output_name, datatype, (*first, *state.dims))
    given = state.initial_state[0] if state.initial_state else None
    row = (*first, *(given.dims if given else [1 if size == -1 else size for size in state.dims]))
    try:
        size = element_count(row) * max(1, datatype.itemsize)
        if size > _MAX_BYTES:
            raise InvalidArgument(f"it takes {size} bytes, more than {_MAX_BYTES}")
        if given and given.data_file:
            data = _read(folder, given.data_file, size if datatype.itemsize else _MAX_BYTES)
            return State(state.input_name, output, from_wire(data, datatype, row))
    except (InvalidArgument, OSError) as error:
        reason = error.message if isinstance(error, InvalidArgument) else error.strerror
        raise InvalidConfig(f"the initial state of '{state.input_name}' cannot be: {reason}") from None
    return State(state.input_name, output, np.full(row, 0 if datatype.itemsize else b"", datatype.dtype))


def _read(folder: Path, name: str, limit: int) -> bytes:
    """What a file in ``folder`` holds; of a longer one the first ``limit`` bytes, as Triton takes them."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        raise InvalidArgument(f"there is no file '{name}' in the model's folder '{folder.name}'")
    with path.open("rb") as file:
        return file.read(limit)


def _spec(specs: Iterable[TensorSpec], name: str, datatype: DataType, shape: tuple[int, ...]) -> TensorSpec:
    """The model's tensor ``name``, which must be of this kind."""
    found = next((spec for spec in specs if spec.name == name), None)
    if found is None or found.datatype is not datatype or not found.admits(shape):
        had = "nothing of that name" if found is None else f"{found.datatype.value} of {list(found.shape)}"
        wanted = f"{datatype.value} of {list(shape)}"
        raise InvalidConfig(f"'sequence_batching' is to have '{name}', {wanted}, and the model has {had}")
    return found
