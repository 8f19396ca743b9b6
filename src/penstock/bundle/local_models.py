"""The models of a pipeline in this process: one of each for single calls, and copies for streams.

One call is fastest if it has all cores. A stream makes several calls at a time, and is fastest if each has few threads: threads that
share one call wait for each other at every operator. The copies are loaded by the first stream, so other callers need neither the time
nor the memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.bundle.local import DeviceLimits, LocalVariant, load_copies, options_of
from penstock.bundle.pipeline import PipelineBundle, load_models, local_models, open_pipeline
from penstock.engines.base import LoadedModel
from penstock.engines.registry import traits
from penstock.errors import IntegrityError, PenstockError
from penstock.pipeline.direct import Direct
from penstock.pipeline.function import Function
from penstock.pipeline.golden import replayed
from penstock.pipeline.streaming.models import LocalModel, guarded
from penstock.resources import usable_cores, usable_memory

_log = logging.getLogger(__name__)

_SHARE, _MOST = 2, 8
"""Without ``max_memory``, the models may take 1 / 2 of the memory. A model that no build has measured has at most 8 copies."""


class CopyPlan(NamedTuple):
    """The copies of a model that a stream loads."""

    copies: int
    threads: int
    """Of each copy."""


def plan_copies(one: LocalVariant, instances: int, cores: int, spare_bytes: int) -> CopyPlan:
    """The copies of ``one``, so that its calls in a stream keep ``cores`` cores busy. ``instances`` is the number that was measured.

    1. A model that was tuned keeps its threads, and makes ``instances`` calls at a time. Another makes a call of one thread for each
       core.
    2. All calls share one copy if the model is reentrant and has one thread. Otherwise, each has its own.
    3. The copies take at most ``spare_bytes``. A model that was not tuned has at most ``_MOST``, because loading takes time. If these
       are too few, it has fewer copies with more threads.
    4. A model that keeps state or runs on a GPU has no copies.
    """
    known, tuned = traits(one.variant.engine), options_of(one.variant)["threads"]
    if one.loaded.keeps_state or (known.gpu_options and known.gpu_options(0).keys() & one.variant.options.keys()):
        return CopyPlan(0, one.threads)
    threads = min(tuned or 1, cores)
    calls = min(instances if tuned else cores, cores // threads)
    is_loaded = threads == one.threads
    count = (1 if one.loaded.reentrant and threads == 1 else calls) - is_loaded
    fitting = min(max(0, spare_bytes // max(1, one.memory_bytes)), calls if tuned else _MOST)
    if count <= fitting or is_loaded:
        return CopyPlan(min(count, fitting), threads)
    return CopyPlan(fitting, cores // fitting) if fitting > 1 else CopyPlan(0, one.threads)


class LocalModels:
    """The models of a pipeline in this process. Any thread may call the methods."""

    def __init__(self, bundle: PipelineBundle, function: Function, limits: DeviceLimits) -> None:
        """Load the models, and replay the golden samples of ``function``. Raises the errors of ``penstock.open``.

        ``bundle`` is not kept, because the engines have their own copies of its models.
        """
        self._path, self._digest = bundle.path.absolute(), bundle.digest
        self._function, self._limits = function, limits
        self._lock = threading.Lock()
        self._streamed: Mapping[str, LocalModel] | None = None
        self._copies: list[LoadedModel] = []
        self._loaded = load_models(bundle.models, limits)
        self.single = local_models(bundle.models, self._loaded)
        """The models for calls of one item."""
        self._plans = self._planned(bundle)
        try:
            self._replay(bundle, {}, replayed(function))
        except BaseException:
            self.unload()
            raise

    def streamed(self) -> Mapping[str, LocalModel]:
        """The models for streams. The first call loads their copies, and replays the golden samples with each. Raises the errors of
        ``penstock.open``. If the bundle is no longer there, streams use the models of single calls.
        """
        with self._lock:
            if self._streamed is None:
                bundle = self._opened_again() if self._plans else None
                self._streamed = self.single if bundle is None else self._load(bundle)
            return self._streamed

    def unload(self) -> None:
        """Release the memory. Idempotent."""
        self._unload_copies()
        for one in self._loaded.values():
            one.loaded.unload()

    def _unload_copies(self) -> None:
        while self._copies:
            self._copies.pop().unload()

    def _planned(self, bundle: PipelineBundle) -> dict[str, CopyPlan]:
        """The plans of the models that have copies."""
        cores = self._limits.threads or usable_cores()
        spare_bytes = self._limits.max_memory or usable_memory() // _SHARE
        spare_bytes -= sum(one.memory_bytes for one in self._loaded.values())
        plans = {}
        for name, one in self._loaded.items():
            plan = plan_copies(one, bundle.models[name].manifest.serving.instances, cores, spare_bytes)
            spare_bytes -= plan.copies * one.memory_bytes
            if plan.copies:
                plans[name] = plan
        return plans

    def _opened_again(self) -> PipelineBundle | None:
        try:
            bundle = open_pipeline(self._path)
            if bundle.digest != self._digest:
                raise IntegrityError("it was replaced")
        except PenstockError as error:
            reason = "streams run the models of single calls, because bundle '%s' cannot be read again: %s"
            _log.warning(reason, self._path.name, error.message)
            return None
        return bundle

    def _load(self, bundle: PipelineBundle) -> Mapping[str, LocalModel]:
        copies: dict[str, list[LocalModel]] = {}
        try:
            for name, plan in self._plans.items():
                one, found = self._loaded[name], list[LocalModel]()
                calls = 0 if one.loaded.reentrant and plan.threads == 1 else 1
                for copy in load_copies(bundle.models[name], one.variant, plan.copies, plan.threads, self._limits):
                    self._copies.append(copy)
                    found.append(msgspec.structs.replace(self.single[name], forward=copy.forward, calls=calls))
                copies[name] = found
            for number in range(max(map(len, copies.values()))):
                chosen = {name: found[number % len(found)] for name, found in copies.items()}
                self._replay(bundle, chosen, replayed(self._function)[-1:])
        except BaseException:
            self._unload_copies()
            raise
        for name, plan in self._plans.items():
            if plan.threads == self._loaded[name].threads:
                copies[name].append(msgspec.structs.replace(self.single[name], calls=1))
        return {**self.single, **{name: guarded(*found) for name, found in copies.items()}}

    def _replay(self, bundle: PipelineBundle, copies: Mapping[str, LocalModel], functions: Sequence[Function]) -> None:
        if not bundle.golden.examples:
            return
        variants = {name: one.variant.name for name, one in self._loaded.items()}
        for function in functions:
            bundle.replay(Direct(function, {**self.single, **copies}), variants)
