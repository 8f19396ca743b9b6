"""A loaded model version put together with what serves it: its check, its scheduler, its instances, its cache."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from penstock.engines.base import RequestModel
from penstock.errors import InvalidConfig
from penstock.online.instances.instance import Instance
from penstock.online.instances.model_calls import Call, ModelCall
from penstock.online.repository.definition import Definition
from penstock.online.repository.handle import Handle
from penstock.online.repository.loading.ensemble import EnsembleLabels, read_ensemble
from penstock.online.repository.loading.input_check import InputCheck, client_signature
from penstock.online.repository.loading.labels import read_labels
from penstock.online.repository.loading.loader import Loaded
from penstock.online.repository.triton.auto_complete import complete
from penstock.online.repository.triton.effective import effective_config, signature_of
from penstock.online.repository.triton.model_config import batching
from penstock.online.repository.triton.sequences import sequencing
from penstock.online.scheduler.base import BatchSource, Scheduler
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.ensemble import EnsembleScheduler, Models
from penstock.online.scheduler.layout import layout_of
from penstock.online.scheduler.rate_limiter import RateLimiter
from penstock.online.scheduler.sequences.batcher import SequenceBatcher
from penstock.protocol.messages import Message, ModelConfig
from penstock.telemetry.quantiles import RecentDurations
from penstock.telemetry.statistics import ModelStatistics
from penstock.telemetry.tracing import Tracer

if TYPE_CHECKING:
    from penstock.online.cache.response_cache import ResponseCache

_OF_ANSWERS = ("max_batch_size", "input", "output", "batch_input", "batch_output")
_log = logging.getLogger(__name__)


class Limits(msgspec.Struct, frozen=True):
    """What holds for all models of a server."""

    max_queue: int = 4096
    max_request_rows: int = 1024
    summaries: bool = False
    """Whether recent durations are kept."""


class Assembler:
    """Belongs to the event loop."""

    def __init__(
        self,
        limits: Limits,
        tracer: Tracer,
        cache: ResponseCache | None,
        models: Models,
        limiter: RateLimiter | None = None,
    ) -> None:
        """``models`` is what ensembles find and ask their parts by."""
        self._limits = limits
        self._tracer = tracer
        self._cache = cache
        self._models = models
        self._limiter = limiter

    def assemble(self, loaded: Loaded) -> Handle:
        """A handle on ``loaded``, not started. Raises InvalidConfig if the configuration contradicts the model."""
        source = loaded.source
        config = effective_config(source, loaded.models, loaded.max_batch)
        scheduler, sources = self._scheduler(config, loaded)
        check = InputCheck.of(config, max(config.max_batch_size, self._limits.max_request_rows))
        gates = self._limiter.gates_of(config) if self._limiter is not None else [None] * len(loaded.models)
        runs = [
            Instance(f"{source.name}-{number}", one, batches, gate)
            for number, (one, batches, gate) in enumerate(zip(loaded.models, sources, gates, strict=True))
        ]
        handle = Handle(source.version, config, check, client_signature(config), scheduler, loaded.models, runs)
        handle.make_call = partial(ModelCall, asyncio.get_running_loop(), cast(Call, self._models.call))
        handle.labels = read_labels(config, source.folder)
        # With the same model, tensors of other shapes are other answers.
        shapes = ModelConfig(**{field: getattr(config, field) for field in _OF_ANSWERS})
        content = shapes.SerializeToString(deterministic=True).hex()
        handle.identity = f"{source.artifact.digest} {source.engine} {source.options} {content}"
        if config.response_cache.enable:
            self._keep_answers(handle, handle.identity)
        return handle

    def assemble_ensemble(self, definition: Definition, version: str) -> Handle:
        """A handle on an ensemble, whose parts must be served. Raises InvalidConfig, and Unavailable if they are not."""
        config = complete(definition.given, definition.name, "ensemble", None, None, 0)
        ensemble = read_ensemble(config, self._models.find)
        for warning in ensemble.graph.warnings:
            _log.warning("ensemble '%s': %s", definition.name, warning)
        statistics, scheduling = self._statistics(config, version, 0.0), batching(config, self._limits.max_queue)
        loop = asyncio.get_running_loop()
        scheduler = EnsembleScheduler(ensemble, scheduling, self._models, loop, statistics, self._tracer)
        check = InputCheck.of(config, max(config.max_batch_size, self._limits.max_request_rows))
        handle = Handle(version, config, check, client_signature(config), scheduler)
        handle.labels = EnsembleLabels(read_labels(config, definition.folder), config, self._models.find)
        handle.identity = config.SerializeToString(deterministic=True).hex()
        if config.response_cache.enable:
            self._keep_answers(handle, lambda: f"{handle.identity} {scheduler.identity}")
        return handle

    def _scheduler(self, config: Message, loaded: Loaded) -> tuple[Scheduler, Sequence[BatchSource]]:
        """The scheduler, and for each instance what it works for."""
        loop, layout, max_queue = asyncio.get_running_loop(), layout_of(config), self._limits.max_queue
        statistics = self._statistics(config, loaded.source.version, loaded.load_s)
        if config.HasField("sequence_batching"):
            model, source = loaded.models[0], loaded.source
            signature, merges = signature_of(model, source.given), not isinstance(model, RequestModel)
            wanted = sequencing(config, signature, source.folder, max_queue, merges=merges)
            batcher = SequenceBatcher(wanted, layout, loop, statistics, tracer=self._tracer)
            return batcher, batcher.batchers
        one = DynamicBatcher(batching(config, max_queue), loop, statistics, tracer=self._tracer, layout=layout)
        return one, [one] * len(loaded.models)

    def _statistics(self, config: Message, version: str, load_s: float) -> ModelStatistics:
        return ModelStatistics(
            name=config.name,
            version=version,
            load_s=load_s,
            recent=RecentDurations() if self._limits.summaries else None,
            decoupled=config.model_transaction_policy.decoupled,
            tags=dict(config.metric_tags),
        )

    def _keep_answers(self, handle: Handle, identity: str | Callable[[], str]) -> None:
        if self._cache is None:
            raise InvalidConfig(
                f"model '{handle.name}' has 'response_cache', and there is no cache", "set 'cache_bytes'"
            )
        handle.cache = self._cache.of(identity, handle.version, handle.statistics, self._limits.max_queue)
