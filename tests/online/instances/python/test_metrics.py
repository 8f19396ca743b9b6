from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.online.instances.process_channel import MetricChanged
from penstock.online.instances.python.backend_utils import as_module
from penstock.online.instances.python.host import Host, here

pb = as_module("pb_utils")


class Page(Host):
    """The server's page of metrics."""

    def __init__(self) -> None:
        self.shown: dict[tuple[str, str], float] = {}

    def measure(self, change: MetricChanged) -> None:
        key = change.name, ",".join(f"{name}={text}" for name, text in change.labels.items())
        self.shown[key] = change.value + (0 if change.replaces else self.shown.get(key, 0))


@pytest.fixture
def page() -> Iterator[Page]:
    before, here.host = here.host, Page()
    yield here.host
    here.host = before
    here.measured.clear()


def test_a_counter_adds_up_and_is_shown_from_the_start(page: Page) -> None:
    metric = pb.MetricFamily("hits", "Hits.", pb.MetricFamily.COUNTER).Metric({"kind": 1})
    assert page.shown == {("hits", "kind=1"): 0}
    metric.increment(2)
    metric.increment(0.5)
    assert metric.value() == 2.5 == page.shown["hits", "kind=1"]


def test_a_gauge_goes_both_ways_and_can_be_set(page: Page) -> None:
    metric = pb.MetricFamily("depth", "Depth.", pb.MetricFamily.GAUGE).Metric()
    metric.set(5)
    metric.increment(-2)
    assert metric.value() == 3 == page.shown["depth", ""]


def test_families_and_labels_of_one_name_are_one(page: Page) -> None:
    one, other = (pb.MetricFamily("m", "M.", "gauge").Metric({"a": "1", "b": 2}) for _ in range(2))
    pb.MetricFamily("m", "M.", "gauge").Metric({"a": "2"}).increment(7)
    one.increment(1)
    other.increment(1)
    assert one.value() == 2


@pytest.mark.parametrize("name", ["", "1st", "a b", "nv_gpu", "penstock_requests", "__x", "ä"])
def test_names_that_no_metric_or_label_can_have(page: Page, name: str) -> None:
    with pytest.raises(pb.TritonModelException, match="not a valid metric name"):
        pb.MetricFamily(name, "", "gauge")
    with pytest.raises(pb.TritonModelException, match="not a valid label name"):
        pb.MetricFamily("m", "", "gauge").Metric({name: "x"})


def test_what_a_metric_cannot_become(page: Page) -> None:
    with pytest.raises(pb.TritonModelException, match="must be a COUNTER or a GAUGE"):
        pb.MetricFamily("m", "", "histogram")
    counter = pb.MetricFamily("c", "", "counter").Metric()
    gauge = pb.MetricFamily("g", "", "gauge").Metric()
    with pytest.raises(pb.TritonModelException, match="cannot be incremented by -1"):
        counter.increment(-1)
    with pytest.raises(pb.TritonModelException, match="cannot be set"):
        counter.set(1)
    with pytest.raises(pb.TritonModelException, match="cannot become inf"):
        gauge.set(float("inf"))
    assert (counter.value(), gauge.value()) == (0, 0)
