"""The figures of the benchmark of streams follow from the measured times."""

from __future__ import annotations

import pytest

from benchmarks.pipelines import video720
from benchmarks.pipelines.video720 import Spent

SECONDS = {
    "serial": (2.0, 3.0),
    "ours": (1.25, 2.4),
    "ours, built": (0.5, 0.9),
    "serial, built": (0.75, 1.0),
    "H.264, serial": (1.2, 2.0),
    "H.264, ours": (1.0, 1.9),
    "H.264, ours, built": (0.4, 0.7),
    "decoding and resizing alone": (0.4, 0.6),
    "model alone, one call at a time": (0.8, 1.5),
    "model alone, a call per core": (0.9, 1.0),
}


def test_ratios_and_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video720, "usable_cores", lambda: 2)
    found = {
        name: [Spent(wall * slow, cpu * slow) for slow in (1.0, 1.5, 1.2)] for name, (wall, cpu) in SECONDS.items()
    }
    rows = {row.name: row for row in video720._rows(found, 100, "openvino")}
    claims = {name: (round(row.value or 0, 3), row.holds) for name, row in rows.items() if row.goal}
    assert claims == {
        "built: speed-up over the serial loop": (4.0, True),
        "built, H.264: speed-up over the serial loop": (3.0, True),
        "same model and engine: speed-up over the serial loop": (1.6, False),
        "same model and engine, H.264: speed-up over the serial loop": (1.2, False),
        "share of the rate that both halves allow on the same cores": (0.96, True),
    }
    assert rows["built: speed-up over the serial loop"].note == "openvino"
    assert rows["share of the slower half's rate"].value == pytest.approx(0.8 / 1.25)
    assert rows["same model and engine: speed-up over the serial loop that the cores allow"].value == pytest.approx(2.5)
    assert rows["built: speed-up over a serial loop of the same engine"].value == pytest.approx(1.5)
    assert rows["time per frame: ours"].value == pytest.approx(15)
