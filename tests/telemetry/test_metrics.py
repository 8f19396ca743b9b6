"""The declarations of metrics: names are legal, distinct and documented."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.telemetry.metrics import BATCH_SIZES, FAMILIES, MODEL_HISTOGRAMS
from penstock.telemetry.statistics import BatchStatistics, ModelStatistics

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "metrics.md"


def test_names_are_legal_unique_and_of_two_families() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"(nv|penstock)_[a-z_]+", name) for name in names)


def test_every_metric_is_documented_with_its_type_and_label() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE))
    assert list(rows) == [family.name for family in FAMILIES]
    for family in FAMILIES:
        kind, _, text = rows[family.name].partition(" | ")
        assert kind == family.kind
        assert (f"; label `{family.label}`" in text) == bool(family.label)


def test_batch_sizes_fall_into_the_bucket_that_ends_at_the_next_power_of_two() -> None:
    (buckets_of,) = [each for family, _, each in MODEL_HISTOGRAMS if family.name == "penstock_batch_rows"]
    for rows in (1, 2, 3, 4, 5, 8, 9, 1000, 1024, 1025, 5000):
        found = buckets_of(ModelStatistics(batches={rows: BatchStatistics(7)}))
        assert found is not None
        counts, total = found
        index = next((i for i, bound in enumerate(BATCH_SIZES) if rows <= bound), len(BATCH_SIZES))
        assert counts == [7 * (i == index) for i in range(len(BATCH_SIZES) + 1)]
        assert total == 7 * rows
