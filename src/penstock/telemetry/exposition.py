"""The metrics page in the text format of Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats/"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from penstock.telemetry.metrics import (
    MACHINE_VALUES,
    MODEL_HISTOGRAMS,
    MODEL_SUMMARIES,
    MODEL_VALUES,
    SERVER_VALUES,
    Buckets,
    Family,
    Number,
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
    """The whole page. A metric family without any series is left out."""
    return "".join(families(models, server, machine)).encode()


def families(
    models: Iterable[ModelStatistics], server: ServerFacts | None = None, machine: MachineUsage | None = None
) -> Iterator[str]:
    """Yield the page family by family, so that callers can do other work in between. With many models, a page takes milliseconds."""
    labelled = [(_labels(model), model) for model in models]
    now_ns = time.monotonic_ns()
    for family, value_of in MODEL_VALUES:
        yield _family(family, [_values(family, labels, value_of(model)) for labels, model in labelled])
    for family, template, buckets_of in _HISTOGRAMS:
        yield _family(family, [_histogram(template, labels, buckets_of(model)) for labels, model in labelled])
    for family, summary_of in MODEL_SUMMARIES:
        kept = [(labels, summary_of(model.recent, model)) for labels, model in labelled if model.recent is not None]
        yield _family(family, [_summary(family, labels, summary, now_ns) for labels, summary in kept])
    own: dict[str, OwnMetric] = {}
    for _, model in labelled:
        own = add_numbers(own, model.metrics) if model.metrics else own
    for name, metric in own.items():
        family = Family(name, metric.kind, metric.help.translate(_HELP_ESCAPES))
        yield _family(family, [_values(family, labels, value) for labels, value in metric.values.items()])
    if server is not None:
        for family, fact in SERVER_VALUES:
            yield _family(family, [_values(family, "", fact(server))])
    if machine is not None:
        for family, usage in MACHINE_VALUES:
            yield _family(family, [_values(family, "", usage(machine))])


def _family(family: Family, samples: Iterable[str]) -> str:
    lines = "".join(samples)
    return lines and f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n{lines}"


def _values(family: Family, labels: str, value: Value) -> str:
    if value is None:
        return ""
    if not isinstance(value, dict):
        return f"{family.name}{{{labels}}} {value}\n" if labels else f"{family.name} {value}\n"
    start = f"{family.name}{{{labels}," if labels else f"{family.name}{{"
    return "".join([f"{start}{_label(family.label, key)}}} {number}\n" for key, number in value.items()])


def _template(name: str, bounds: Sequence[Number]) -> str:
    """Format string for the lines of one model's histogram. Built once, because a page can have tens of thousands of lines."""
    buckets = "".join(f'{name}_bucket{{{_HERE},le="{limit}"}} %d\n' for limit in (*map(repr, bounds), "+Inf"))
    return f"{buckets}{name}_sum{{{_HERE}}} %s\n{name}_count{{{_HERE}}} %d\n"


_HERE = "\0"
_HISTOGRAMS = [(family, _template(family.name, bounds), buckets_of) for family, bounds, buckets_of in MODEL_HISTOGRAMS]


def _histogram(template: str, labels: str, buckets: Buckets | None) -> str:
    if buckets is None:
        return ""
    counts, total = buckets
    seen = list(accumulate(counts))
    return (template % (*seen, total, seen[-1])).replace(_HERE, labels)


def _summary(family: Family, labels: str, summary: Summary, now_ns: int) -> str:
    window, count, total_ns = summary
    quantiles = "".join(
        f'{family.name}{{{labels},quantile="{quantile}"}} {"NaN" if ns is None else ns / 1000}\n'
        for quantile, ns in zip(QUANTILES, window.quantiles(QUANTILES, now_ns), strict=True)
    )
    return f"{quantiles}{family.name}_sum{{{labels}}} {total_ns // 1000}\n{family.name}_count{{{labels}}} {count}\n"


_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = {"model", "version", "reason", "le", "quantile"}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def _labels(model: ModelStatistics) -> str:
    """Labels of all series of a model. Tags that are not valid labels are left out, because one invalid line would break the page."""
    tags = {name: value for name, value in model.tags.items() if name not in _RESERVED and _LABEL_NAME.fullmatch(name)}
    return label_text({"model": model.name, "version": model.version, **tags})


def label_text(labels: Mapping[str, str]) -> str:
    """The text of ``labels`` between the braces of a series."""
    return ",".join(_label(name, value) for name, value in labels.items())


@lru_cache(1000)
def _label(name: str, value: str) -> str:
    return f'{name}="{value.translate(_ESCAPES)}"'
