"""Assembles the handle of a loaded model version: input check, scheduler, instances and cache."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import msgspec

from penstock.engines.base import RequestModel
from penstock.errors import InvalidConfig
from penstock.online.cache.response_cache import ModelCache, ResponseCache
from penstock.online.instances.instance import Instance
from penstock.online.instances.model_calls import ModelCall, StartCall
from penstock.online.repository.config import ModelConfig, RateLimiting
from penstock.online.repository.handle import Handle
from penstock.online.repository.loading.ensemble import EnsembleLabels, read_ensemble
from penstock.online.repository.loading.input_check import InputCheck
from penstock.online.repository.loading.labels import read_labels
from penstock.online.repository.loading.loader import LoadedVersion
from penstock.online.repository.loading.pipeline import LoadedPipeline
from penstock.online.repository.loading.scheduling import batching, layout_of, sequencing
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.triton.auto_complete import Model, complete, signature_of
from penstock.online.scheduler.base import Scheduler
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.ensemble import EnsembleScheduler, Models
from penstock.online.scheduler.pipeline import PipelineScheduler
from penstock.online.scheduler.rate_limiter import RateLimiter, ResourceGate
from penstock.online.scheduler.sequences.batcher import SequenceBatcher
from penstock.pipeline.wire import signature_of as signature_of_pipeline
from penstock.telemetry.quantiles import RecentDurations
from penstock.telemetry.statistics import ModelStatistics
from penstock.telemetry.tracing import Tracer

_OF_RESPONSES = ("max_batch_size", "input", "output", "batch_input", "batch_output")
_log = logging.getLogger(__name__)


class RequestLimits(msgspec.Struct, frozen=True):
    """Request limits that apply to every model of a server."""

    max_queue: int = 4096
    max_request_rows: int = 1024
    """Maximum rows of a merged batch. Ignored for models whose configuration has ``max_batch_size``."""
    summaries: bool = False
    """True to keep recent durations for the summary metrics."""
    max_pipeline_bytes: int | None = None
    """Maximum bytes of intermediate results of one pipeline. See ``default_limit``."""


class Assembler:
    """Creates handles. Used only on the event loop."""

    def __init__(
        self,
        limits: RequestLimits,
        tracer: Tracer,
        cache: ResponseCache | None,
        models: Models[Handle],
        limiter: RateLimiter | None = None,
    ) -> None:
        """Ensembles find and call their models through ``models``."""
        self._limits = limits
        self._tracer = tracer
        self._cache = cache
        self._models = models
        self._limiter = limiter

    def assemble(self, loaded: LoadedVersion) -> Handle:
        """The handle of ``loaded``, with instances that are not started. Raises InvalidConfig if configuration and model disagree."""
        resolved, config = loaded.resolved, loaded.config
        scheduler, batchers = self._scheduler(loaded)
        parts = zip(loaded.models, batchers, self._gates(config), strict=True)
        runs = [Instance(f"{resolved.name}-{number}", *part) for number, part in enumerate(parts)]
        # The configuration is part of the identity, because it can change the shapes of tensors in responses.
        shapes = msgspec.json.encode([getattr(config, field) for field in _OF_RESPONSES], order="deterministic")
        identity = f"{resolved.artifact.digest} {resolved.engine} {resolved.options} {shapes.decode()}"
        return Handle(
            resolved.version,
            config,
            self._check(resolved.given, config, loaded.models[0]),
            scheduler,
            loaded.models,
            runs,
            labels=read_labels(config, resolved.source.folder),
            identity=identity,
            cache=self._cache_of(config, resolved.version, identity, scheduler),
            make_call=partial(ModelCall, asyncio.get_running_loop(), cast(StartCall, self._models.call)),
        )

    def assemble_ensemble(self, source: ModelSource, version: str) -> Handle:
        """The handle of an ensemble. Raises InvalidConfig. Raises Unavailable if a model of the ensemble is not served."""
        config = complete(source.given, source.name, "ensemble", None, None, 0)
        ensemble = read_ensemble(config, self._models.find)
        for warning in ensemble.graph.warnings:
            _log.warning("ensemble '%s': %s", source.name, warning)
        statistics, limits = self._statistics(config, version, 0.0), batching(config, self._limits.max_queue)
        loop = asyncio.get_running_loop()
        scheduler = EnsembleScheduler(ensemble, limits, self._models, loop, statistics, self._tracer)
        identity = config.wire.hex()
        return Handle(
            version,
            config,
            self._check(source.given, config),
            scheduler,
            labels=EnsembleLabels(read_labels(config, source.folder), config, self._models.find),
            identity=identity,
            cache=self._cache_of(config, version, lambda: f"{identity} {scheduler.identity}", scheduler),
        )

    def assemble_pipeline(self, loaded: LoadedPipeline) -> Handle:
        """The handle of a pipeline and of its models. Raises InvalidConfig if configuration and pipeline disagree."""
        return self.join(loaded, {name: self.assemble(part) for name, part in loaded.parts.items()})

    def join(self, loaded: LoadedPipeline, parts: Mapping[str, Handle]) -> Handle:
        """The handle of a pipeline over ``parts``, the handles of its models. Raises InvalidConfig as above."""
        source, function = loaded.source, loaded.function
        config = complete(source.given, source.name, "pipeline", signature_of_pipeline(function), None, 0)
        statistics = self._statistics(config, loaded.version, loaded.load_s)
        limits, loop = batching(config, self._limits.max_queue), asyncio.get_running_loop()
        max_bytes = self._limits.max_pipeline_bytes
        scheduler = PipelineScheduler(
            function, parts, self._models.call, limits, loop, statistics, self._tracer, max_bytes=max_bytes
        )
        return Handle(
            loaded.version,
            config,
            self._check(source.given, config),
            scheduler,
            labels=read_labels(config, source.folder),
            identity=loaded.identity,
            cache=self._cache_of(config, loaded.version, loaded.identity, scheduler),
            function=function,
            parts=parts,
        )

    def _scheduler(self, loaded: LoadedVersion) -> tuple[Scheduler, Sequence[DynamicBatcher]]:
        """The scheduler, and the source of batches for each instance."""
        config, resolved, model = loaded.config, loaded.resolved, loaded.models[0]
        loop, layout, max_queue = asyncio.get_running_loop(), layout_of(config), self._limits.max_queue
        statistics = self._statistics(config, resolved.version, loaded.load_s)
        if config.sequence_batching is not None:
            signature, merges = signature_of(model, resolved.given), not isinstance(model, RequestModel)
            wanted = sequencing(config, signature, resolved.source.folder, max_queue, merges=merges)
            batcher = SequenceBatcher(wanted, layout, loop, statistics, tracer=self._tracer)
            return batcher, batcher.batchers
        one = DynamicBatcher(batching(config, max_queue), loop, statistics, tracer=self._tracer, layout=layout)
        return one, [one] * len(loaded.models)

    def _gates(self, config: ModelConfig) -> list[ResourceGate | None]:
        """The rate limiter's gate of each instance, according to its instance group."""
        gates: list[ResourceGate | None] = []
        for group in config.instance_group:
            limits = group.rate_limiter or RateLimiting()
            needs = {resource.name: resource.count for resource in limits.resources}
            wanted = config.name, needs, limits.priority
            gates += [self._limiter.gate(*wanted) if self._limiter else None for _ in range(group.count)]
        return gates

    def _check(self, given: ModelConfig, config: ModelConfig, model: Model | None = None) -> InputCheck:
        """The check of the model's requests. A configured ``max_batch_size`` limits each request. The server's ``max_batch``
        limits only merged batches.
        """
        facts = () if model is None or isinstance(model, RequestModel) else (model.optional_inputs, model.unranked)
        is_set = given.max_batch_size is not None or (isinstance(model, RequestModel) and model.max_batch is not None)
        max_rows = config.max_rows if is_set else max(config.max_rows, self._limits.max_request_rows)
        return InputCheck(config, max_rows, *facts)

    def _statistics(self, config: ModelConfig, version: str, load_s: float) -> ModelStatistics:
        return ModelStatistics(
            name=config.name,
            version=version,
            load_s=load_s,
            recent=RecentDurations() if self._limits.summaries else None,
            decoupled=config.decoupled,
            tags=dict(config.metric_tags),
        )

    def _cache_of(
        self, config: ModelConfig, version: str, identity: str | Callable[[], str], scheduler: Scheduler
    ) -> ModelCache | None:
        if not config.response_cache:
            return None
        if self._cache is None:
            reason = f"model '{config.name}' enables 'response_cache', but the server has no cache"
            raise InvalidConfig(reason, "set 'cache_bytes'")
        return self._cache.of(identity, version, scheduler.statistics, self._limits.max_queue)
