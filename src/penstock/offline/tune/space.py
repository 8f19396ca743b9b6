"""The candidates: all combinations of version, engine and number of threads. This module neither loads nor measures models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.artifact import Artifact
from penstock.engines.registry import traits
from penstock.offline.compress.versions.versions import Version
from penstock.offline.judge.judge import ORIGINAL
from penstock.resources import MachineFacts

BASELINE_ENGINE = "onnxruntime"
_SHORT_CALL_MS = 1.0
_BF16_ISA = ("avx512_bf16", "amx_bf16", "bf16")


class Candidate(Version, frozen=True, kw_only=True):
    """One way to run the model: a version, an engine and a number of threads."""

    name: str
    engine: str
    threads: int
    options: dict[str, Any]

    @property
    def exact(self) -> bool:
        """True if the candidate has the original's weights and computes in the original's precision."""
        return self.precision == "fp32" and not self.compression

    @property
    def disk_bytes(self) -> int:
        """The size of the candidate in a bundle, in bytes."""
        return self.stored_bytes or self.artifact.size_bytes

    @property
    def numerics(self) -> tuple[str, str, str]:
        """Candidates with equal numerics give the same outputs, except for rounding."""
        return self.engine, self.precision, self.artifact.digest


def originals(model: Artifact, threads: Sequence[int]) -> list[Candidate]:
    """The unmodified model on ONNX Runtime with default settings: one candidate for each number of threads."""
    return [
        Candidate(model, name=f"{ORIGINAL}-t{count}", engine=BASELINE_ENGINE, threads=count, options={"threads": count})
        for count in threads
    ]


def candidates(
    versions: Sequence[Version], engines: Sequence[str], threads: Sequence[int], machine: MachineFacts
) -> list[Candidate]:
    """Every candidate worth measuring on ``machine``. A version that only some engines can run faster is tried only on these engines.

    FP32 versions are also tried in BF16 on engines that support BF16, if the CPU supports it too. Emulated BF16 is slower and less
    accurate than FP32.
    """
    bf16 = next((isa for isa in _BF16_ISA if isa in machine.isa), None)
    found = []
    for engine in engines:
        for count in threads:
            for version in versions:
                if version.engines and engine not in version.engines:
                    continue
                found.append(_candidate(engine, count, version))
                if "bf16" in traits(engine).precisions and bf16 and version.precision == "fp32":
                    requires = (*version.requires, bf16)
                    rounded = msgspec.structs.replace(version, precision="bf16", requires=requires)
                    found.append(_candidate(engine, count, rounded))
    return found


def fallback(fp32: Artifact, threads: int) -> Candidate:
    """The variant that runs on any machine: the optimised model on ONNX Runtime."""
    return msgspec.structs.replace(_candidate(BASELINE_ENGINE, threads, Version(fp32)), name="fallback")


def thread_counts(cores: int) -> tuple[int, ...]:
    """Thread counts worth trying: 1, the number of cores, and the powers of two between them."""
    return tuple(sorted({*(1 << bit for bit in range(cores.bit_length())), cores}))


def instances(cores: int, threads: int, call_ms: float) -> int:
    """Number of instances: one if a call is shorter than a handover between threads, otherwise as many as the cores allow."""
    return 1 if call_ms < _SHORT_CALL_MS else max(1, cores // threads)


def engine_options(engine: str, threads: int, precision: str = "fp32") -> dict[str, Any]:
    """The options with which ``engine`` runs a candidate of ``precision``."""
    options: dict[str, Any] = {"threads": threads}
    if threads > 1:
        options |= traits(engine).shared_options
    if traits(engine).precisions:
        options["precision"] = "bf16" if precision == "bf16" else "f32"
    return options


def _candidate(engine: str, threads: int, version: Version) -> Candidate:
    options = engine_options(engine, threads, version.precision)
    parts = (engine, version.compression, version.precision, version.calibration, f"t{threads}")
    name = "-".join(filter(None, parts))
    return Candidate(**msgspec.structs.asdict(version), name=name, engine=engine, threads=threads, options=options)
