"""Metrics of a Triton Python model: ``MetricFamily`` and ``Metric`` of ``triton_python_backend_utils``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, Literal

from penstock.online.instances.process_channel import MetricChanged
from penstock.online.instances.python.host import here
from penstock.online.instances.python.tensors import TritonModelException

_NAME = re.compile(r"(?!nv_|penstock_|__)[a-zA-Z_][a-zA-Z0-9_]*")


class MetricFamily:
    """All metrics with the same name and different labels. ``kind`` is ``COUNTER`` or ``GAUGE``. Families with the same name share
    their metrics.
    """

    COUNTER: Final = "counter"
    GAUGE: Final = "gauge"

    def __init__(self, name: str, description: str, kind: Literal["counter", "gauge"]) -> None:
        if not _NAME.fullmatch(name):
            raise TritonModelException(f"'{name}' is not a valid metric name, or is reserved by the server")
        if kind not in (self.COUNTER, self.GAUGE):
            raise TritonModelException(f"metric '{name}' must be a COUNTER or a GAUGE, got {kind!r}")
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels: Mapping[str, str] | None = None) -> Metric:  # noqa: N802 - the name that models know
        for label in labels or ():
            if not _NAME.fullmatch(label):
                raise TritonModelException(f"'{label}' is not a valid label name")
        return Metric(self, {name: str(value) for name, value in (labels or {}).items()})


class Metric:
    """One time series of a family, with its own labels."""

    def __init__(self, family: MetricFamily, labels: dict[str, str]) -> None:
        self._family, self._labels = family, labels
        self._key = family.name, frozenset(labels.items())
        self._change(0, replaces=False)

    def increment(self, value: float) -> None:
        """Add ``value``, which must not be negative for a counter."""
        if self._family.kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException(f"counter '{self._family.name}' cannot be incremented by {value}")
        self._change(value, replaces=False)

    def set(self, value: float) -> None:
        """Set the value of a gauge. Counters can only be incremented."""
        if self._family.kind == MetricFamily.COUNTER:
            raise TritonModelException(f"counter '{self._family.name}' cannot be set")
        self._change(value, replaces=True)

    def value(self) -> float:
        """The value in this instance. The metrics page shows the sum over all instances."""
        return here.measured[self._key]

    def _change(self, value: float, replaces: bool) -> None:
        value, family = float(value), self._family
        if not math.isfinite(value):
            raise TritonModelException(f"metric '{family.name}' cannot become {value}")
        with here.measuring:
            here.measured[self._key] = value + (0 if replaces else here.measured.get(self._key, 0))
            here.host.measure(
                MetricChanged(family.name, family.kind, family.description, self._labels, value, replaces)
            )
