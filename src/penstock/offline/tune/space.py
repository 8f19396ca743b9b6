"""The space of candidates: engine × precision × calibration × threads. Pure: nothing is loaded or measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.artifact import Artifact
from penstock.resources import MachineFacts

BASELINE_ENGINE = "onnxruntime"
ORIGINAL = "original"
"""What the names of the untouched model's candidates begin with."""
_BF16_ISA = ("avx512_bf16", "amx_bf16", "bf16")


class Candidate(msgspec.Struct, frozen=True):
    """One way to run the model."""

    name: str
    engine: str
    precision: str
    threads: int
    artifact: Artifact
    options: dict[str, Any]
    calibration: str = ""
    requires: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether it computes in the original's own precision."""
        return self.precision == "fp32"

    @property
    def numerics(self) -> tuple[str, str, str]:
        """Candidates that are equal in this give the same answers; threads do not change them beyond rounding."""
        return self.engine, self.precision, self.artifact.digest


def originals(model: Artifact, threads: Sequence[int]) -> list[Candidate]:
    """The untouched model on ONNX Runtime with its default settings, at each number of threads."""
    return [
        Candidate(f"{ORIGINAL}-t{count}", BASELINE_ENGINE, "fp32", count, model, {"threads": count})
        for count in threads
    ]


def candidates(
    fp32: Artifact,
    int8: Mapping[str, Artifact],
    engines: Sequence[str],
    threads: Sequence[int],
    machine: MachineFacts,
    int8_requires: tuple[str, ...] = (),
) -> list[Candidate]:
    """Every candidate worth measuring on ``machine``.

    ``fp32`` is the optimised model, ``int8`` the quantised ones by calibration. BF16 is offered by OpenVINO only, and
    only where the CPU computes in it: emulated BF16 is slower than FP32 and less accurate.
    """
    bf16 = next((isa for isa in _BF16_ISA if isa in machine.isa), None)
    found = []
    for engine in engines:
        for count in threads:
            found.append(_candidate(engine, "fp32", count, fp32))
            if engine == "openvino" and bf16:
                found.append(_candidate(engine, "bf16", count, fp32, requires=(bf16,)))
            found += [_candidate(engine, "int8", count, model, name, int8_requires) for name, model in int8.items()]
    return found


def fallback(fp32: Artifact, threads: int) -> Candidate:
    """What runs on any machine: the optimised model on ONNX Runtime."""
    return msgspec.structs.replace(_candidate(BASELINE_ENGINE, "fp32", threads, fp32), name="fallback")


def thread_counts(cores: int) -> tuple[int, ...]:
    """Thread counts worth trying: one, all, and the powers of two between."""
    counts = {1, cores}
    power = 2
    while power < cores:
        counts.add(power)
        power *= 2
    return tuple(sorted(counts))


def _candidate(
    engine: str, precision: str, threads: int, artifact: Artifact, calibration: str = "", requires: tuple[str, ...] = ()
) -> Candidate:
    options: dict[str, Any] = {"threads": threads}
    if engine == "onnxruntime" and threads > 1:
        # Threads that spin after a call take the core that the server's event loop waits for.
        options["spinning"] = False
    if engine == "openvino":
        options["precision"] = "bf16" if precision == "bf16" else "f32"
    name = "-".join(part for part in (engine, precision, calibration, f"t{threads}") if part)
    return Candidate(name, engine, precision, threads, artifact, options, calibration, requires)
