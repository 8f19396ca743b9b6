"""The serving scenario goes on where a part or a peer fails, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import fact
from benchmarks.scenarios import serving, telemetry_cost
from benchmarks.serving import grpc_transport, idle_connections, null_model, small_model


def test_a_part_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(quick: bool) -> list:
        raise RuntimeError("no luck")

    monkeypatch.setattr(serving, "PARTS", {"one": fail, "two": lambda quick: [fact("x", 1, "s")]})
    first, second = serving.run(quick=True)
    assert (first.name, first.value, first.note) == ("one", None, "no luck")
    assert second.value == 1


def test_a_peer_that_is_not_installed_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_PEER_MOSEC", str(tmp_path))
    monkeypatch.setattr(small_model, "PEERS", {"mosec": small_model.PEERS["mosec"]})
    (row,) = small_model.run(quick=True)
    assert (row.name, row.value) == ("mosec", None)
    assert "benchmarks.peers.install mosec" in row.note


def test_the_null_model_is_measured() -> None:
    rows = null_model.run(quick=True)
    assert all(row.value is not None and row.value > 100 for row in rows)
    assert rows[0].interval is not None


@pytest.mark.slow
def test_grpcio_is_slower() -> None:
    (row,) = grpc_transport.run(quick=True)
    assert row.value is not None
    assert row.value > 1


def test_descriptors_are_raised_as_far_as_is_allowed() -> None:
    allowed = idle_connections.allow_descriptors(256)
    assert allowed >= 256
    assert idle_connections.allow_descriptors(256) == allowed


@pytest.mark.slow
def test_telemetry_has_a_cost() -> None:
    rows = telemetry_cost.run(quick=True)
    assert [row.unit for row in rows] == ["%", "%"]
    assert all(row.value is not None and -50 < row.value < 100 for row in rows)
