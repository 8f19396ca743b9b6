"""The page that Prometheus scrapes, in its text format: https://prometheus.io/docs/instrumenting/exposition_formats/"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.telemetry.metrics import (
    MACHINE_VALUES,
    MODEL_HISTOGRAMS,
    MODEL_SUMMARIES,
    MODEL_VALUES,
    SERVER_VALUES,
    Buckets,
    Family,
    ServerFacts,
    Summary,
    Value,
)
from penstock.telemetry.quantiles import QUANTILES
from penstock.telemetry.statistics import ModelStatistics, OwnMetric, add_numbers
from penstock.telemetry.usage import MachineUsage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(
    models: Iterable[ModelStatistics], server: ServerFacts | None = None, machine: MachineUsage | None = None
) -> bytes:
    """The page that is scraped; a family without any series is left out."""
    labelled = [(_labels(model), model) for model in models]
    now_ns = time.monotonic_ns()
    lines: list[str] = []
    for family, value_of in MODEL_VALUES:
        _family(lines, family, (_values(family, labels, value_of(model)) for labels, model in labelled))
    for family, bounds, buckets_of in MODEL_HISTOGRAMS:
        limits = [repr(bound) for bound in bounds]
        _family(lines, family, (_histogram(family, labels, limits, buckets_of(model)) for labels, model in labelled))
    for family, summary_of in MODEL_SUMMARIES:
        kept = ((labels, summary_of(model.recent, model)) for labels, model in labelled if model.recent is not None)
        _family(lines, family, (_summary(family, labels, summary, now_ns) for labels, summary in kept))
    own: dict[str, OwnMetric] = {}
    for _, model in labelled:
        own = add_numbers(own, model.metrics)
    for name, metric in own.items():
        family = Family(name, metric.kind, metric.help.translate(_HELP_ESCAPES))
        _family(lines, family, [[f"{name}{_braces(labels)} {value}\n" for labels, value in metric.values.items()]])
    if server is not None:
        for family, fact in SERVER_VALUES:
            _family(lines, family, [_values(family, "", fact(server))])
    if machine is not None:
        for family, usage in MACHINE_VALUES:
            _family(lines, family, [_values(family, "", usage(machine))])
    return "".join(lines).encode()


def _family(lines: list[str], family: Family, samples: Iterable[Iterable[str]]) -> None:
    written = [line for series in samples for line in series]
    if written:
        lines.append(f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n")
        lines += written


def _values(family: Family, labels: str, value: Value) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, number in value.items():
            yield f"{family.name}{_braces(labels, _label(family.label, key))} {number}\n"
    elif value is not None:
        yield f"{family.name}{_braces(labels)} {value}\n"


def _histogram(family: Family, labels: str, limits: Sequence[str], buckets: Buckets | None) -> Iterator[str]:
    if buckets is None:
        return
    counts, total = buckets
    seen = 0
    for limit, count in zip((*limits, "+Inf"), counts, strict=True):
        seen += count
        yield f'{family.name}_bucket{{{labels},le="{limit}"}} {seen}\n'
    yield f"{family.name}_sum{{{labels}}} {total}\n{family.name}_count{{{labels}}} {seen}\n"


def _summary(family: Family, labels: str, summary: Summary, now_ns: int) -> Iterator[str]:
    window, count, total_ns = summary
    for quantile, ns in zip(QUANTILES, window.quantiles(QUANTILES, now_ns), strict=True):
        yield f'{family.name}{{{labels},quantile="{quantile}"}} {"NaN" if ns is None else ns / 1000}\n'
    yield f"{family.name}_sum{{{labels}}} {total_ns // 1000}\n{family.name}_count{{{labels}}} {count}\n"


_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = {"model", "version", "reason", "le", "quantile"}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def _labels(model: ModelStatistics) -> str:
    """The labels of all series of a model; a tag that cannot be a label is left out, since one wrong line spoils the page."""
    tags = {name: value for name, value in model.tags.items() if name not in _RESERVED and _LABEL_NAME.fullmatch(name)}
    return label_text({"model": model.name, "version": model.version, **tags})


def label_text(labels: Mapping[str, str]) -> str:
    """``labels`` as they are within the braces of a series."""
    return ",".join(_label(name, value) for name, value in labels.items())


def _label(name: str, value: str) -> str:
    return f'{name}="{value.translate(_ESCAPES)}"'


def _braces(*labels: str) -> str:
    given = ",".join(each for each in labels if each)
    return f"{{{given}}}" if given else ""
