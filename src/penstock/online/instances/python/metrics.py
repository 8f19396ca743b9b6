"""Metrics that a Triton Python model keeps of itself, on the server's page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, Literal

from penstock.online.instances.python.host import Metered, here
from penstock.online.instances.python.tensors import TritonModelException

_NAME = re.compile(r"(?!nv_|penstock_|__)[a-zA-Z_][a-zA-Z0-9_]*")


class Metric:
    """One series of a family."""

    def __init__(self, metered: Metered) -> None:
        self._metered = metered
        self._key = metered.name, frozenset(metered.labels.items())
        self._change(0, replaces=False)

    def increment(self, value: float) -> None:
        """A counter's ``value`` is at least 0."""
        if self._metered.kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException(f"counter '{self._metered.name}' cannot be incremented by {value}")
        self._change(value, replaces=False)

    def set(self, value: float) -> None:
        """Of a gauge only."""
        if self._metered.kind == MetricFamily.COUNTER:
            raise TritonModelException(f"counter '{self._metered.name}' cannot be set")
        self._change(value, replaces=True)

    def value(self) -> float:
        """What this instance has made of it; the page shows the sum over the instances."""
        return here.measured[self._key]

    def _change(self, value: float, replaces: bool) -> None:
        value = float(value)
        if not math.isfinite(value):
            raise TritonModelException(f"metric '{self._metered.name}' cannot become {value}")
        with here.measuring:
            here.measured[self._key] = value + (0 if replaces else here.measured.get(self._key, 0))
            here.host.measure(self._metered, value, replaces)


class MetricFamily:
    """Metrics of one name; ``kind`` is ``COUNTER`` or ``GAUGE``. Families of one name are one."""

    COUNTER: Final = "counter"
    GAUGE: Final = "gauge"

    def __init__(self, name: str, description: str, kind: Literal["counter", "gauge"]) -> None:
        if not _NAME.fullmatch(name):
            raise TritonModelException(f"'{name}' is no name for a metric, or one of the server's own")
        if kind not in (self.COUNTER, self.GAUGE):
            raise TritonModelException(f"metric '{name}' must be a COUNTER or a GAUGE")
        self._name, self._description, self._kind = name, description, kind

    def Metric(self, labels: Mapping[str, str] | None = None) -> Metric:  # noqa: N802 - the name that models know
        for label in labels or ():
            if not _NAME.fullmatch(label):
                raise TritonModelException(f"'{label}' is no name for a label")
        given = {name: str(value) for name, value in (labels or {}).items()}
        return Metric(Metered(self._name, self._kind, self._description, given))
