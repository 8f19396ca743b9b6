"""Completes a configuration: checks the user's fields against the loaded model, and derives all other fields from the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.config import did_you_mean
from penstock.engines.base import Finding, LoadedModel, RequestModel, Severity
from penstock.errors import InvalidConfig
from penstock.online.repository.config import ModelConfig, SequenceBatching
from penstock.online.repository.triton.rules import error, prefix
from penstock.online.repository.triton.schema import DATA_TYPES, number_of, to_message, typed
from penstock.protocol.messages import Message, ModelInput, ModelInstanceGroup
from penstock.tensor import DataType, Signature, TensorSpec

Model = LoadedModel | RequestModel

_IDLE_MICROSECONDS = 1_000_000


def complete(  # noqa: PLR0913 - the model's facts, each by its name
    given: ModelConfig,
    name: str,
    platform: str,
    signature: Signature | None,
    rows: int | None,
    instances: int,
    *,
    decoupled: bool = False,
    backend: str = "",
    filename: str = "",
    where: str = "",
) -> ModelConfig:
    """The completed configuration: ``given`` with every missing field filled in. ``where`` is the file of ``given``, for error
    messages.

    ``signature`` is the model's own signature, or None for an ensemble. ``rows`` is the largest batch that the model accepts, or
    None if its requests cannot be merged. The default of ``max_batch_size`` is ``rows``, or 0 if the tensors in ``given`` include
    the batch dimension. Raises InvalidConfig if ``given`` contradicts the model.
    """
    message, whole = to_message(given), to_message(given)
    for finding in differences(message, signature, decoupled=decoupled):
        if finding.severity is Severity.ERROR:
            raise InvalidConfig(prefix(name, where) + finding.message, finding.hint)
    whole.name, whole.platform = name, given.platform or platform
    if platform != "ensemble":
        whole.backend = given.backend or backend or platform.partition("_")[0]
    whole.default_model_filename = given.default_model_filename or filename
    if not whole.HasField("version_policy"):
        whole.version_policy.latest.num_versions = 1
    if signature is None:
        whole.max_batch_size = message.max_batch_size
        return typed(whole)
    whole.max_batch_size = _rows(message, signature, rows)
    _take_tensors(whole, signature)
    _take_instances(whole, instances)
    whole.optimization.SetInParent()
    if decoupled:
        whole.model_transaction_policy.decoupled = True
    if whole.HasField("sequence_batching"):
        batcher = whole.sequence_batching
        batcher.max_sequence_idle_microseconds = batcher.max_sequence_idle_microseconds or _IDLE_MICROSECONDS
    elif whole.max_batch_size:
        whole.dynamic_batching.SetInParent()
    elif given.dynamic_batching is not None and given.max_batch_size is None:
        raise InvalidConfig(
            f"{prefix(name, where)}it cannot be batched", "remove 'dynamic_batching', or set 'max_batch_size'"
        )
    return typed(whole)


def signature_of(model: Model, given: ModelConfig) -> Signature:
    """The model's own signature, including the optional inputs that occur in ``given``.

    An input of unknown rank gets its ``dims`` from ``given``.
    """
    if isinstance(model, RequestModel):
        return model.signature
    named = {tensor.name: tensor for tensor in given.input}
    inputs = [*model.signature.inputs, *(spec for spec in model.optional_inputs if spec.name in named)]
    for number, spec in enumerate(inputs):
        if spec.name in model.unranked and spec.name in named and named[spec.name].dims:
            shape = (*((-1,) if given.batchable else ()), *named[spec.name].model_dims)
            inputs[number] = TensorSpec(spec.name, spec.datatype, shape)
    return Signature(tuple(inputs), model.signature.outputs)


def differences(given: Message, signature: Signature | None, *, decoupled: bool = False) -> Iterator[Finding]:
    """The contradictions between ``given`` and the model."""
    if given.response_cache.enable and decoupled:
        yield error(
            "response_cache.enable", "is true, but responses of a decoupled model cannot be cached", "remove it"
        )
    if signature is None:
        return
    if given.model_transaction_policy.decoupled and not decoupled:
        yield error(
            "model_transaction_policy.decoupled",
            "is true, but the model sends one response to each request",
            "remove it",
        )
    made = made_inputs(given)
    for name in sorted(made.difference(signature.input_names)):
        path = "sequence_batching" if given.HasField("sequence_batching") else "batch_input"
        hint = did_you_mean(name, signature.input_names)
        yield error(path, f"names the input '{name}', which the model does not have", hint)
    for field, specs in (("input", signature.inputs), ("output", signature.outputs)):
        tensors = {tensor.name: (f"{field}[{number}]", tensor) for number, tensor in enumerate(getattr(given, field))}
        known = [spec.name for spec in specs]
        for name, (path, _) in tensors.items():
            if name not in known:
                yield error(
                    f"{path}.name", f"is '{name}', but the model has no such {field}", did_you_mean(name, known)
                )
        for spec in specs:
            if spec.name not in made:
                yield from difference(given, *tensors.get(spec.name, (field, ModelInput())), spec)


def difference(given: Message, path: str, tensor: Message, spec: TensorSpec) -> Iterator[Finding]:
    """The contradictions between the configured ``tensor`` (empty if it is not configured) and the model's ``spec``."""
    field = path.partition("[")[0]
    number = number_of(spec.datatype)
    if tensor.data_type not in (0, number):
        known = DATA_TYPES.values_by_number
        got, want = (known[each].name if each in known else each for each in (tensor.data_type, number))
        yield error(f"{path}.data_type", f"is {got}, but {field} '{spec.name}' of the model is {want}")
    scattered = {name for one in given.batch_output for name in one.target_name} if field == "output" else ()
    if spec.name in scattered or (field == "input" and tensor.allow_ragged_batch):
        return  # ragged inputs are concatenated, so they have no batch dimension
    # A model whose first dimension is 1 accepts batches of one row.
    if given.max_batch_size > 0 and spec.shape[:1] != (-1,) and (given.max_batch_size, *spec.shape[:1]) != (1, 1):
        reason = f"but {field} '{spec.name}' of the model, {list(spec.shape)}, has no free first dimension"
        yield error("max_batch_size", f"is {given.max_batch_size}, {reason}", "remove it, or write 0")
        return
    dims = _model_dims(tensor)
    wanted = spec.shape[1:] if given.max_batch_size > 0 or _leaves_out_batch(given, tensor, spec) else spec.shape
    is_alike = len(dims) == len(wanted) and all(
        -1 in pair or pair[0] == pair[1] for pair in zip(dims, wanted, strict=True)
    )
    if tensor.dims and not is_alike:
        hint = "omit the batch dimension if 'max_batch_size' is above 0" if len(dims) != len(wanted) else ""
        which = "reshape.shape" if tensor.HasField("reshape") else "dims"
        yield error(f"{path}.{which}", f"is {dims}, but {field} '{spec.name}' of the model has {list(wanted)}", hint)


def _model_dims(tensor: Message) -> list[int]:
    """The dimensions of ``tensor`` that the model receives, without the batch dimension."""
    return list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


def _leaves_out_batch(given: Message, tensor: Message, spec: TensorSpec) -> bool:
    has_less = spec.shape[:1] == (-1,) and len(_model_dims(tensor)) == len(spec.shape) - 1
    return has_less and not given.HasField("max_batch_size")


def _rows(given: Message, signature: Signature, rows: int | None) -> int:
    """The effective ``max_batch_size``."""
    if given.HasField("max_batch_size"):
        is_special = given.HasField("sequence_batching") or given.batch_input
        is_special = is_special or any(one.allow_ragged_batch for one in given.input)
        # Requests are not merged if rows depend on each other. This cannot be tested if the batcher creates inputs.
        return given.max_batch_size if rows is not None or is_special else 0
    for tensors, specs in ((given.input, signature.inputs), (given.output, signature.outputs)):
        by_name = {spec.name: spec for spec in specs}
        if any(one.dims and not _leaves_out_batch(given, one, by_name[one.name]) for one in tensors):
            return 0
    return rows or 0


def _take_tensors(whole: Message, signature: Signature) -> None:
    hidden = made_inputs(whole) | {state.output_name for state in whole.sequence_batching.state}
    first = 1 if whole.max_batch_size > 0 else 0
    for part, specs in ((whole.input, signature.inputs), (whole.output, signature.outputs)):
        tensors = {tensor.name: tensor for tensor in part}
        for spec in specs:
            if spec.name in hidden and spec.name not in tensors:
                continue
            tensor = tensors.get(spec.name) or part.add(name=spec.name)
            tensor.data_type = number_of(spec.datatype)
            if not tensor.dims:
                tensor.dims.extend(spec.shape[first:])
            elif not first and len(_model_dims(tensor)) < len(spec.shape):
                for dims in (tensor.dims, tensor.reshape.shape) if tensor.HasField("reshape") else (tensor.dims,):
                    dims.insert(0, spec.shape[0])


def _take_instances(whole: Message, instances: int) -> None:
    if len(whole.instance_group) < 2:
        group = whole.instance_group[0] if whole.instance_group else whole.instance_group.add()
        group.count = instances
    for number, group in enumerate(whole.instance_group):
        group.name = group.name or f"{whole.name}_{number}"
        group.count = max(1, group.count)
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            group.kind = ModelInstanceGroup.KIND_GPU if group.gpus else ModelInstanceGroup.KIND_CPU


def made_inputs(config: Message) -> set[str]:
    """The names of the inputs that the batcher creates and clients do not send: controls, states, and batch inputs."""
    batcher = config.sequence_batching
    return {
        *(control.name for control in batcher.control_input),
        *(state.input_name for state in batcher.state),
        *(target for one in config.batch_input for target in one.target_name),
    }


def declared_tensors(config: ModelConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The configured inputs and outputs, in the form of engine options (``declared_signature``). Used for models whose files do not
    describe their tensors.

    Includes the inputs that the batcher creates. Raises InvalidConfig for a tensor without ``data_type`` or ``dims``.
    """
    for tensor in [*config.input, *config.output]:
        if not tensor.data_type or not (tensor.dims or tensor.reshape):
            reason = f"'{tensor.name}' needs 'data_type' and 'dims', because the model's file does not contain them"
            raise InvalidConfig(prefix(config.name) + reason)
    inputs, outputs = (
        [_entry(config, tensor.name, tensor.data_type, tensor.model_dims) for tensor in part]
        for part in (config.input, config.output)
    )
    batcher = config.sequence_batching or SequenceBatching()
    for control in batcher.control_input:
        inputs += [_entry(config, control.name, one.values[0], [1]) for one in control.control]
    for state in batcher.state:
        inputs.append(_entry(config, state.input_name, state.data_type, state.dims))
        if all(state.output_name != output.name for output in config.output):
            outputs.append(_entry(config, state.output_name, state.data_type, state.dims))
    for one in config.batch_input:
        inputs += [_entry(ModelConfig(), name, one.data_type, [-1]) for name in one.target_name]
    return inputs, outputs


def _entry(config: ModelConfig, name: str, datatype: DataType | None, dims: Sequence[int]) -> dict[str, Any]:
    shape = [-1, *dims] if config.batchable else [*dims]
    return {"name": name, "datatype": datatype.value if datatype else "", "shape": shape}
