"""Warms up a loaded model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from penstock.engines.base import LoadedModel, RequestModel
from penstock.errors import InvalidConfig, PenstockError, Unavailable
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.loading.merging import unmerged
from penstock.online.repository.loading.recorded_requests import folder_of, read_recorded
from penstock.online.repository.loading.warm_up_run import Runner
from penstock.online.repository.loading.warm_up_samples import read_samples
from penstock.online.repository.resolved_version import ResolvedVersion
from penstock.online.repository.triton.auto_complete import Model, complete, signature_of
from penstock.online.repository.triton.rules import prefix
from penstock.online.scheduler.base import InstanceDied
from penstock.storage.local import LocalStorage
from penstock.tensor import Array, DataType, Signature

_log = logging.getLogger(__name__)

_GUESS_S = 30.0
"""Maximum seconds for a call with guessed inputs."""


def prepare(resolved: ResolvedVersion, models: Sequence[Model], reason: str | None = None) -> ModelConfig:
    """Warm up ``models``, one for each instance of ``resolved``, and return the completed configuration.

    Runs the requests in the configuration's ``model_warmup``, or guessed requests if there are none. Then runs the recorded
    requests that the model still accepts. ``reason`` is the result of ``unmerged``, if known. Raises InvalidConfig if the
    configuration contradicts the model, and PenstockError if a model rejects a configured request.
    """
    distinct = list({id(model): model for model in models}.values())
    if not isinstance(models[0], RequestModel):
        for output, kind in models[0].left_out.items():
            _log.warning("model '%s': output '%s' is omitted: it is a %s, not a tensor", resolved.name, output, kind)
    if reason is None:
        reason = unmerged(resolved, models[0])
    if reason:
        _log.warning("%s", reason)
    rows = min(_rows(resolved, model, is_merged=not reason) for model in distinct)
    config = effective_config(resolved, models, rows or None)
    if config.model_warmup or resolved.load_options.warmup_folder:
        runner = Runner(config, models[0], resolved)
        for sample in read_samples(config, resolved.source.folder):
            try:
                for model in distinct * sample.count:
                    runner.run(model, sample.request, sample.rows)
            except PenstockError as error:
                error.message = f"failed to run warmup sample '{sample.name}': {error.message}"
                raise
        _replay(resolved, runner, distinct)
    return config


def effective_config(resolved: ResolvedVersion, models: Sequence[Model], rows: int | None) -> ModelConfig:
    """The completed configuration of ``resolved``. ``models`` has one model per instance. For ``rows``, see ``complete``.

    Raises InvalidConfig if the configuration contradicts the model.
    """
    model = models[0]
    for tensor in resolved.given.input if not isinstance(model, RequestModel) else ():
        if tensor.optional and tensor.name in model.signature.input_names:
            raise InvalidConfig(
                f"{prefix(resolved.name)}input '{tensor.name}' cannot be 'optional': the model needs it",
                "remove 'optional', or export the model with a default for the input",
            )
    return complete(
        resolved.given,
        resolved.name,
        resolved.platform,
        signature_of(model, resolved.given),
        rows,
        len(models),
        decoupled=isinstance(model, RequestModel) and model.decoupled,
        backend=resolved.backend.name,
        filename=resolved.backend.filename,
    )


def _rows(resolved: ResolvedVersion, model: Model, *, is_merged: bool) -> int:
    """Maximum rows in a batch; 0 if requests are not merged. Found by running guessed requests, except for Python models."""
    given = resolved.given
    if isinstance(model, RequestModel):
        return resolved.max_batch if model.max_batch is None else model.max_batch
    is_made = given.batch_input or any(tensor.allow_ragged_batch for tensor in given.input)
    is_set = given.max_batch_size is not None
    if is_made or (is_set and given.model_warmup) or given.sequence_batching is not None:
        return resolved.max_batch if model.signature.batchable else 0
    is_row_for_row = warm_up(model, resolved.max_batch if is_merged else 1, resolved.name)
    return resolved.max_batch if is_merged and is_row_for_row else 0


def _replay(resolved: ResolvedVersion, runner: Runner, models: Sequence[Model]) -> None:
    count = 0
    root = resolved.load_options.warmup_folder
    if not root:
        return
    storage = LocalStorage(folder_of(root, resolved.name), follows_links=True)
    for name, request in read_recorded(storage, resolved.name):
        try:
            if isinstance(request, PenstockError):
                raise request
            for model in models:
                runner.run(model, request)
        except PenstockError as error:
            _log.warning("model '%s': recorded request '%s' is skipped: %s", resolved.name, name, error.message)
        else:
            count += 1
    if count:
        _log.info("model '%s' warmed up with %d recorded requests", resolved.name, count)


def warm_up(model: LoadedModel, max_batch: int, name: str = "", limit_s: float = _GUESS_S) -> bool:
    """Run batches of 1 and ``max_batch`` rows of zeros. Returns True if the model returns as many rows as it receives.

    Free dimensions of these guessed inputs are 1. If the model rejects the inputs or does not return in time, the model ``name``
    is served without warm-up, and a warning is logged. A model that keeps state is not called.
    """
    signature = model.signature
    if model.keeps_state:
        return signature.batchable
    for batch in dict.fromkeys((1, max_batch if signature.batchable else 1)):
        try:
            outputs = model.forward_within(_zeros(signature, batch), limit_s)
        except (InstanceDied, Unavailable):
            raise  # the model's process has ended, or is being ended
        except PenstockError as error:
            _log.warning(
                "model '%s' is served without warm-up: it rejects a guessed batch of %d zero rows: %s "
                "(describe a valid request in 'model_warmup')",
                name, batch, error.message,
            )  # fmt: skip
            break
        if signature.batchable and any(array.shape[:1] != (batch,) for array in outputs.values()):
            return False
    return signature.batchable


def _zeros(signature: Signature, batch: int) -> dict[str, Array]:
    inputs: dict[str, Array] = {}
    for spec in signature.inputs:
        shape = [1 if dim == -1 else dim for dim in spec.shape]
        if signature.batchable:
            shape[0] = batch
        inputs[spec.name] = np.full(shape, b"" if spec.datatype is DataType.BYTES else 0, spec.datatype.dtype)
    return inputs
