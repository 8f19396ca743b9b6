"""The whole configuration of a model version that is in memory."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engines.base import LoadedModel, RequestModel
from penstock.errors import InvalidConfig
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.resolved_version import ResolvedVersion
from penstock.online.repository.triton.auto_complete import complete
from penstock.online.repository.triton.rules import prefix
from penstock.tensor import Signature

Model = LoadedModel | RequestModel


def effective_config(resolved: ResolvedVersion, models: Sequence[Model], rows: int | None) -> ModelConfig:
    """That of ``resolved``, loaded as ``models``, one for each instance; ``rows`` as of ``complete``. Raises InvalidConfig if it
    contradicts the model."""
    model = models[0]
    for tensor in resolved.given.input if not isinstance(model, RequestModel) else ():
        if tensor.optional and tensor.name in model.signature.input_names:
            raise InvalidConfig(
                f"{prefix(resolved.name, '')}input '{tensor.name}' cannot be 'optional': the model needs it",
                "leave that out, or export the model with a default for it",
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


def signature_of(model: Model, given: ModelConfig) -> Signature:
    """The model's own, with those of its optional inputs that ``given`` names."""
    named = [tensor.name for tensor in given.input]
    optional = () if isinstance(model, RequestModel) else model.optional_inputs
    inputs = (*model.signature.inputs, *(spec for spec in optional if spec.name in named))
    return Signature(inputs, model.signature.outputs)
