"""Load the model of a bundle in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from penstock.bundle.manifest import Variant
from penstock.bundle.open import Bundle
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine, is_available, traits
from penstock.errors import ResourceExhausted
from penstock.resources import machine_facts, usable_cores


class DeviceLimits(msgspec.Struct, frozen=True):
    """Limits on what models may use of a device."""

    threads: int = 0
    """Threads of each model, of all its calls together. 0 means the number that was measured when its bundle was built, or a thread
    for each usable core if none was measured."""
    max_memory: int = 0
    """Maximum bytes of memory of all models together, as their engines estimate it; 0 means no limit."""
    power_saving: bool = False
    """True if idle threads sleep, instead of waiting actively for the next call."""


NO_LIMITS = DeviceLimits()


class LocalVariant(NamedTuple):
    """A loaded model, and the variant that it is."""

    loaded: LoadedModel
    variant: Variant
    memory_bytes: int
    """Estimated memory of the model."""
    threads: int


def options_of(variant: Variant) -> dict[str, Any]:
    """The engine's options of ``variant``. A bundle that was packed without tuning has none, so it gets those of a model file: its
    option ``threads`` is 0, which the caller replaces by the number of usable cores.
    """
    usual = {} if "threads" in variant.options else {"threads": 0, **traits(variant.engine).shared_options}
    return {**usual, **variant.options}


def load_variant(
    bundle: Bundle, limits: DeviceLimits = NO_LIMITS, used_bytes: int = 0, *, shares_cores: bool = False
) -> LocalVariant:
    """Load the first variant of ``bundle`` that runs on this machine. Other models already use ``used_bytes`` of memory.

    With ``shares_cores``, other work needs the cores between the calls, so idle threads sleep unless the variant says otherwise.

    Raises Unavailable if no variant runs here, ResourceExhausted over the memory limit, and the errors of the engine.
    """
    variant = bundle.choose(machine_facts(), is_available)
    engine, artifact, cores = get_engine(variant.engine), bundle.artifact(variant), usable_cores()
    threads = limits.threads or min(options_of(variant)["threads"] or cores, cores)
    options = _options(variant, threads, limits, shares_cores)
    memory_bytes = engine.estimate(artifact, options).memory_bytes
    if limits.max_memory and used_bytes + memory_bytes > limits.max_memory:
        raise ResourceExhausted(
            f"model '{bundle.name}' would raise the estimated memory to {used_bytes + memory_bytes:,} bytes, "
            f"but max_memory is {limits.max_memory:,} bytes",
            "raise max_memory, or build a smaller model with `penstock compress`",
        )
    return LocalVariant(engine.load(artifact, options), variant, memory_bytes, threads)


def load_copies(
    bundle: Bundle, variant: Variant, count: int, threads: int, limits: DeviceLimits
) -> Iterator[LoadedModel]:
    """Load ``count`` copies of ``variant`` with ``threads`` threads each, as they are taken. Raises the errors of the engine."""
    engine, artifact = get_engine(variant.engine), bundle.artifact(variant)
    for _ in range(count):
        yield engine.load(artifact, _options(variant, threads, limits, shares_cores=True))


def _options(variant: Variant, threads: int, limits: DeviceLimits, shares_cores: bool) -> dict[str, Any]:
    options, shared = {**options_of(variant), "threads": threads}, traits(variant.engine).shared_options
    if shares_cores:
        options = {**shared, **options}
    return {**options, **shared} if limits.power_saving else options
