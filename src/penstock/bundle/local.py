"""Load the model of a bundle in this process."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from penstock.bundle.manifest import Variant
from penstock.bundle.open import Bundle
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine, is_available, traits
from penstock.errors import ResourceExhausted
from penstock.resources import machine_facts


class DeviceLimits(msgspec.Struct, frozen=True):
    """Limits on what models may use of a device."""

    threads: int = 0
    """Threads of each model; 0 keeps the number that was measured when its bundle was built."""
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


def load_variant(
    bundle: Bundle, limits: DeviceLimits = NO_LIMITS, used_bytes: int = 0, *, shares_cores: bool = False
) -> LocalVariant:
    """Load the first variant of ``bundle`` that runs on this machine. Other models already use ``used_bytes`` of memory.

    With ``shares_cores``, other work needs the cores between the calls, so idle threads sleep unless the variant says otherwise.

    Raises Unavailable if no variant runs here, ResourceExhausted over the memory limit, and the errors of the engine.
    """
    variant = bundle.choose(machine_facts(), is_available)
    engine, artifact = get_engine(variant.engine), bundle.artifact(variant)
    options = dict[str, Any](traits(variant.engine).shared_options if shares_cores else {}) | dict(variant.options)
    if limits.threads:
        options["threads"] = limits.threads
    if limits.power_saving:
        options |= traits(variant.engine).shared_options
    memory_bytes = engine.estimate(artifact, options).memory_bytes
    if limits.max_memory and used_bytes + memory_bytes > limits.max_memory:
        raise ResourceExhausted(
            f"model '{bundle.name}' would raise the estimated memory to {used_bytes + memory_bytes:,} bytes, "
            f"but max_memory is {limits.max_memory:,} bytes",
            "raise max_memory, or build a smaller model with `penstock compress`",
        )
    return LocalVariant(engine.load(artifact, options), variant, memory_bytes)
