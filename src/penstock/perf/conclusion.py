"""The conclusion of a build in sentences: what was asked, what came out, how certain it is, and what to do next. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from penstock.bundle.evidence import Accuracy, CandidateRecord, Evidence
from penstock.bundle.manifest import Manifest
from penstock.bundle.titles import title
from penstock.measurement import percent, percent_beside

_KEPT = "the original: "
"""Prefix of the reason why the original was chosen."""
_METRICS = {
    "": "accuracy",
    "top-1": "top-1 accuracy",
    "top-5": "top-5 accuracy",
    "agreement": "agreement with the original",
    "fidelity": "fidelity to the original's outputs",
}
"""Metrics in words. The names of all other metrics are standard terms."""
_MUCH = 1.1
"""A rejected candidate is mentioned if it is faster than the chosen one by this ratio."""
_SAME_SIZE = 1.05


def headline(evidence: Evidence) -> str:
    """The result in one line."""
    before, after = evidence.baseline, evidence.candidate(evidence.chosen)
    if after.name == before.name:
        why = after.reason.removeprefix(_KEPT) if after.reason.startswith(_KEPT) else ""
        return f"The original is kept{f': {why}' if why else ''}"
    parts = [_pace(after)] if after.speedup else []
    smaller = before.disk_bytes / max(1, after.disk_bytes)
    if smaller >= _SAME_SIZE:
        parts.append(f"{smaller:.1f} times smaller")
    elif smaller <= 1 / _SAME_SIZE:
        parts.append(f"{1 / smaller:.1f} times larger")
    if after.accuracy is not None:
        loss, metric = after.accuracy.loss.value, metric_words(after.accuracy.metric)
        unproven = (
            ""
            if is_exact(after) or _bound(after.accuracy) <= evidence.limit
            else f" on {after.accuracy.samples} samples"
        )
        parts.append(f"{percent(loss) if loss > 0 else 'no measured'} loss of {metric}{unproven}")
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def conclude(manifest: Manifest, evidence: Evidence, bundle: str = "") -> list[tuple[str, str]]:
    """The parts of the conclusion, each with its label. Commands stand between backticks. ``bundle`` is the bundle's file if known."""
    chosen = evidence.candidate(evidence.chosen)
    parts = (
        ("Asked", [_asked(manifest, evidence)]),
        ("Result", _result(evidence, chosen)),
        ("Certainty", _certainty(evidence, chosen)),
        ("Next", _next_steps(evidence, chosen, bundle)),
    )
    texts = [(label, " ".join(sentences)) for label, sentences in parts]
    return [(label, text) for label, text in texts if text]


def metric_words(metric: str) -> str:
    """The metric as words in a sentence."""
    return _METRICS.get(metric, metric)


def size_words(size_bytes: int) -> str:
    """A size with a unit, to three significant digits."""
    unit, name = (1 << 20, "MiB") if size_bytes >= 1 << 20 else (1 << 10, "KiB")
    size = size_bytes / unit
    return f"{size:,.{max(0, 2 - int(math.log10(max(1, size))))}f} {name}"


def _asked(manifest: Manifest, evidence: Evidence) -> str:
    what = (manifest.source.file if manifest.source else "") or manifest.name
    is_coded = any(variant.coding for variant in manifest.variants)
    goal = "small" if is_coded else "fast"
    calls = f" on calls of {evidence.rows_per_call} rows" if evidence.rows_per_call > 1 else ""
    proof = ", proven with 95 % confidence" if evidence.prove_accuracy else ""
    metric, limit = metric_words(evidence.metric), evidence.limit
    loss = f"a loss of at most {percent(limit)} in {metric}{proof}" if math.isfinite(limit) else f"any loss in {metric}"
    p99 = f" and a p99 of at most {evidence.p99_ms:g} ms per call" if evidence.p99_ms else ""
    return f"Make {what} as {goal} as possible on this machine{calls}, with {loss}{p99}."


def _result(evidence: Evidence, chosen: CandidateRecord) -> Iterator[str]:
    before = evidence.baseline
    tried = f"Penstock tried {evidence.tried}"
    if chosen.name == before.name:
        yield f"{tried} and kept the original, unmodified ({title(chosen)})."
        if chosen.latency_ms is not None:
            yield f"One call takes {chosen.latency_ms:.3g} ms."
        return
    time = ""
    if chosen.latency_ms is not None and before.latency_ms is not None:
        time = f": one call takes {chosen.latency_ms:.3g} ms instead of {before.latency_ms:.3g} ms"
    yield f"{tried} and chose {title(chosen)}{time}."
    if chosen.accuracy is not None:
        yield _accuracy(chosen.accuracy, before.accuracy)
    size, original = size_words(chosen.disk_bytes), size_words(before.disk_bytes)
    yield (
        f"The model takes {size}, as the original."
        if size == original
        else f"The model takes {size} instead of {original}."
    )


def _accuracy(after: Accuracy, before: Accuracy | None) -> str:
    shown = f"On {after.samples} samples, its {metric_words(after.metric)} is {after.shown}"
    if before is None or after.metric in ("fidelity", "agreement"):  # the original's is 100 % by definition
        return f"{shown}."
    original = before.show(before.value)
    return f"{shown}, as the original's." if original == after.shown else f"{shown}; the original's is {original}."


def _certainty(evidence: Evidence, chosen: CandidateRecord) -> Iterator[str]:
    if (speed := chosen.speedup) is not None:
        proof = "" if speed.low > 1 else ", so it may be no faster"
        yield f"The speed-up is {speed.value:.2f}, with 95 % confidence between {speed.low:.2f} and {speed.high:.2f}{proof}."
    if busy := evidence.disturbance(chosen):
        yield f"The machine was busy during the timing ({busy}), so all times and speed-ups are less reliable."
    if chosen.name == evidence.baseline.name or chosen.accuracy is None:
        return
    if is_exact(chosen):
        yield "It has the original's weights and precision, so the outputs differ only by rounding."
    elif math.isfinite(evidence.limit):
        bound, limit = _bound(chosen.accuracy), percent(evidence.limit)
        most = percent_beside(bound, evidence.limit)
        if bound <= evidence.limit:
            yield f"With 95 % confidence, the loss is at most {most}, within the limit of {limit}."
        else:
            yield f"That the loss is within {limit} is an estimate and not proven: with 95 % confidence, it is at most {most}."
    if evidence.seen_rows:
        yield f"{evidence.seen_rows} evaluation rows are also calibration rows, so the accuracy may be overestimated."


def _next_steps(evidence: Evidence, chosen: CandidateRecord, bundle: str) -> Iterator[str]:
    if evidence.disturbance(chosen):
        yield "Build again on a quiet machine before you rely on the speed."
    is_inexact = chosen.name != evidence.baseline.name and not is_exact(chosen)
    if is_inexact and chosen.accuracy is not None and _bound(chosen.accuracy) > evidence.limit:
        yield "To be more certain of the loss, evaluate on more samples."
    if (missed := _missed(evidence, chosen)) is not None and missed.accuracy is not None and missed.speedup is not None:
        most = math.inf if evidence.max_output_error is None else evidence.max_output_error
        is_of_output = missed.accuracy.metric == "fidelity" or missed.accuracy.unjudged_error > most
        option = "--max-output-error" if is_of_output else "--max-accuracy-loss"
        doubt = " (measured on a busy machine)" if evidence.disturbance(missed) else ""
        yield (
            f"{title(missed)} is {missed.speedup.value:.2f} times as fast as the original{doubt} but was rejected: {missed.reason}. "
            f"If that is acceptable, raise `{option}`."
        )
    yield f"Serve the bundle with `penstock serve {shlex.quote(bundle) if bundle else 'BUNDLE'}`."


def _missed(evidence: Evidence, chosen: CandidateRecord) -> CandidateRecord | None:
    """The fastest candidate that was rejected for its accuracy, if it is much faster than the chosen one."""
    found = [
        one
        for one in evidence.candidates
        if one.status == "rejected"
        and not is_too_slow(one)
        and one.latency_ms is not None
        and one.accuracy is not None
        and not one.accuracy.broken
        and one.speedup is not None
        and one.speedup.low > 1
        and (chosen.latency_ms is None or one.latency_ms * _MUCH < chosen.latency_ms)
    ]
    return min(found, key=lambda one: one.latency_ms or math.inf, default=None)


def is_exact(record: CandidateRecord) -> bool:
    """True if the candidate has the original's weights and computes in FP32."""
    return record.precision == "fp32" and not record.compression


def is_too_slow(record: CandidateRecord) -> bool:
    """True if the candidate was rejected for its p99 latency, not for its accuracy."""
    return record.status == "rejected" and record.reason.startswith("p99 ")


def _bound(accuracy: Accuracy) -> float:
    """The upper bound of the loss at 95 % confidence."""
    return accuracy.loss.high if accuracy.bound is None else accuracy.bound


def _pace(record: CandidateRecord) -> str:
    """The speed-up in words."""
    speed = record.speedup
    assert speed is not None
    if speed.low > 1:
        return f"{speed.value:.2f} times as fast"
    return f"{speed.value:.2f} times the speed" if speed.high < 1 else "not provably faster"
