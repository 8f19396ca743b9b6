"""The space of candidates: version × engine × threads. Pure: nothing is loaded or measured here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.artifact import Artifact
from penstock.engines.registry import traits
from penstock.offline.compress.versions import Version
from penstock.offline.judge.judge import ORIGINAL
from penstock.resources import MachineFacts

BASELINE_ENGINE = "onnxruntime"
_BF16_ISA = ("avx512_bf16", "amx_bf16", "bf16")


class Candidate(msgspec.Struct, frozen=True):
    """One way to run the model: a version in an engine with a number of threads."""

    name: str
    engine: str
    precision: str
    threads: int
    artifact: Artifact
    options: dict[str, Any]
    calibration: str = ""
    compression: str = ""
    requires: tuple[str, ...] = ()
    stored_bytes: int = 0
    """Bytes as a coded model; 0 if it is stored uncoded."""

    @property
    def exact(self) -> bool:
        """Whether it computes what the original does, in its precision and with its weights."""
        return self.precision == "fp32" and not self.compression

    @property
    def disk_bytes(self) -> int:
        """Bytes in a bundle."""
        return self.stored_bytes or self.artifact.size_bytes

    @property
    def numerics(self) -> tuple[str, str, str]:
        """Candidates with equal numerics give the same answers; threads change them by rounding at most."""
        return self.engine, self.precision, self.artifact.digest


def originals(model: Artifact, threads: Sequence[int]) -> list[Candidate]:
    """The untouched model on ONNX Runtime with its default settings, at each number of threads."""
    return [
        Candidate(f"{ORIGINAL}-t{count}", BASELINE_ENGINE, "fp32", count, model, {"threads": count})
        for count in threads
    ]


def candidates(
    versions: Sequence[Version], engines: Sequence[str], threads: Sequence[int], machine: MachineFacts
) -> list[Candidate]:
    """Every candidate worth measuring on ``machine``.

    FP32 versions are also tried in BF16 on engines with that precision, if the CPU computes in it: emulated BF16 is slower than FP32
    and less accurate.
    """
    bf16 = next((isa for isa in _BF16_ISA if isa in machine.isa), None)
    found = []
    for engine in engines:
        for count in threads:
            for version in versions:
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
    """Thread counts worth trying: one, all, and the powers of two between."""
    counts = {1, cores}
    power = 2
    while power < cores:
        counts.add(power)
        power *= 2
    return tuple(sorted(counts))


def _candidate(engine: str, threads: int, version: Version) -> Candidate:
    options: dict[str, Any] = {"threads": threads}
    if threads > 1:
        options |= traits(engine).shared_options
    if traits(engine).precisions:
        options["precision"] = "bf16" if version.precision == "bf16" else "f32"
    parts = (engine, version.compression, version.precision, version.calibration, f"t{threads}")
    return Candidate(
        name="-".join(part for part in parts if part),
        engine=engine,
        precision=version.precision,
        threads=threads,
        artifact=version.artifact,
        options=options,
        calibration=version.calibration,
        compression=version.compression,
        requires=version.requires,
        stored_bytes=version.stored_bytes,
    )
