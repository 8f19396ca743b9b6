"""Titles and outcomes of candidates, in words for people. ``CandidateRecord.name`` and ``status`` are identifiers for programs."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from penstock.bundle.evidence import CandidateRecord, Evidence
from penstock.engines.registry import engine_title

_ORIGINAL = re.compile(r"original(-t\d+)?")
"""The names of the unmodified model. The names of all other candidates begin with their engine."""
_CALIBRATION = re.compile(r"min-max|per-tensor|[^-]+")
_CALIBRATION_WORDS = {
    "attention": "with attention scores",
    "best": "tuned ranges",
    "entropy": "entropy ranges",
    "linear": "",  # the normal placement
    "lstm": "LSTM with ranges at run time",
    "min-max": "min-max ranges",
    "mse": "MSE ranges",
    "percentile": "percentile ranges",
    "per-tensor": "per-tensor scales",
    "symmetric": "symmetric activations",
    "transposed": "transposed convolutions",
    "wide": "more operators",
}
_STEP_WORDS = {
    "fp32": "converted",
    "int8": "INT8",
    "int8-mixed": "INT8 partly FP32",
    "int8-qat": "INT8 with training",
    "low-rank": "factors of low rank",
    "prune": "pruned weights",
}
_SHRINK, _SHARE = "shrink-", "share-"
_OUTCOMES = {
    "outrun": (
        ("not timed", "not timed"),
        ("not judged", "not judged"),
        ("the same operators as", "as fast, not more accurate"),
        ("slower than", "slower"),
        ("not provably faster", "not faster"),
        ("not measurable", "machine too busy to tell"),
        ("a close call", "nearly as good"),
        (".* too little for", "not worth its threads"),
        (".* the size of", "larger"),
        ("of the same size but slower", "slower"),
        ("", "slower than the chosen one"),
    ),
    "rejected": (
        ("p99 ", "slower than allowed"),
        ("may lose", "not proven to be accurate enough"),
        ("output .* is NaN", "outputs are not finite"),
        ("", "less accurate than allowed"),
    ),
    "baseline": (("", "the original"),),
}
"""For each status, patterns of the start of the reason, with the outcome. The first match decides."""


def title(record: CandidateRecord) -> str:
    """What the candidate is, e.g. ``OpenVINO · INT8 (tuned ranges) · 2 threads``. Titles of candidates of one build differ."""
    engine = engine_title(record.engine)
    threads = f"{record.threads or 'default'} thread{'s' if record.threads != 1 else ''}"
    if _ORIGINAL.fullmatch(record.name):
        return f"Original · {engine} · {threads}"
    arithmetic = precision_title(record.precision, record.calibration)
    # The precision names INT8 already.
    words = (_step(step).removeprefix("INT8").strip() for step in record.compression.split("+"))
    steps = ", ".join(filter(None, words))
    return " · ".join(filter(None, (engine, arithmetic, steps, threads)))


def precision_title(precision: str, calibration: str = "") -> str:
    """The precision in words: ``INT8 (tuned ranges)``, or ``FP16 weights`` if only weights are stored in it."""
    kind, _, rest = precision.partition("-")
    details = ", ".join(filter(None, map(_calibration, _CALIBRATION.findall(calibration))))
    return f"{kind.upper()} {rest}".strip() + (f" ({details})" if details else "")


def steps_title(names: str) -> str:
    """The steps of a compression plan in words: ``channels removed for 1.5x, INT8``. ``names`` joins their names by ``+``."""
    return ", ".join(map(_step, names.split("+")))


def outcome(record: CandidateRecord) -> str:
    """The result of the candidate in a few words, e.g. ``not faster`` or ``less accurate than allowed``. Never empty."""
    patterns = _OUTCOMES.get(record.status, ())
    return next((words for start, words in patterns if re.match(start, record.reason)), record.status)


def verdict(record: CandidateRecord) -> str:
    """The outcome with its measured reason, as one text."""
    # The reasons of these candidates are complete sentences, which repeat the outcome.
    if record.status in ("outrun", "baseline") and record.reason:
        return record.reason
    return f"{outcome(record)}: {record.reason}" if record.reason else outcome(record)


def variant_title(name: str, evidence: Evidence | None) -> str:
    """The title of the candidate from which the variant ``name`` was made; ``name`` if it is unknown."""
    records = (evidence.baseline, *evidence.candidates) if evidence is not None else ()
    return next((title(record) for record in records if record.name == name), name)


def described(record: CandidateRecord) -> dict[str, Any]:
    """The record as plain data for JSON, with its title and outcome."""
    return {**msgspec.to_builtins(record), "title": title(record), "outcome": outcome(record)}


def _calibration(word: str) -> str:
    return _CALIBRATION_WORDS.get(word, word)


def _step(name: str) -> str:
    if name.startswith(_SHRINK):
        return f"channels removed for {name.removeprefix(_SHRINK)}"
    if name.startswith(_SHARE):
        return f"shared weights ({name.removeprefix(_SHARE)})"
    return _STEP_WORDS.get(name, name)
