"""Servers for benchmarks start, answer alike, and are gone afterwards."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks import models, servers
from benchmarks.rounds import burst, difference, interleave, ratio, side
from penstock.perf.http_client import Address
from penstock.perf.load import run
from penstock.perf.oip_client import infer_all

INPUTS = [{"input": np.full((1, 32), value, np.float32)} for value in (0.5, -1.0)]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_peer_and_penstock_give_the_same_answers(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the peer is an extra")
    model = models.mlp(tmp_path / "mlp.onnx")
    cores, _ = servers.split_cores()
    with servers.penstock(model, cores) as ours, servers.fastapi(model, cores) as theirs:
        answers = [run(infer_all(server.address, "mlp", INPUTS)) for server in (ours, theirs)]
        loaded = burst(side(ours, "mlp", INPUTS), connections=2, seconds=0.1)
        assert ours.cpu_seconds() > 0
    for one, other in zip(*answers, strict=True):
        np.testing.assert_allclose(one["output"], other["output"], rtol=1e-5)
    assert loaded.throughput > 0
    assert not is_running(ours.pid)
    assert not is_running(theirs.pid)


def test_a_server_that_fails_to_start_says_why() -> None:
    with (
        pytest.raises(RuntimeError, match="out of luck"),
        servers.serving(["-c", "raise SystemExit('out of luck')"], servers.split_cores()[0]),
    ):
        pass


def test_a_server_is_ended_with_the_scenario_that_fails() -> None:
    code = "import time; print('ready http=127.0.0.1:9', flush=True); time.sleep(60)"
    with pytest.raises(KeyError), servers.serving(["-c", code], servers.split_cores()[0]) as server:
        raise KeyError
    assert not is_running(server.pid)


def test_pinning_ends_with_its_context() -> None:
    before = os.sched_getaffinity(0)
    with servers.pinned({min(before)}):
        assert os.sched_getaffinity(threading.get_native_id()) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_rounds_take_turns_and_drop_the_first() -> None:
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    found = interleave(runs, rounds=2)
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert found == {"a": [3, 6], "b": [4, 5]}


def test_difference_of_medians() -> None:
    found = difference([8.0, 9.0, 100.0], [2.0, 3.0, 4.0])
    assert found.value == 6.0
    assert found.low <= 6.0 <= found.high


def test_what_a_server_started_counts_and_ends_with_it() -> None:
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=False); print('ready http=127.0.0.1:9 grpc=127.0.0.1:8', flush=True); print('x' * 100_000);"
        " print(flush=True); time.sleep(60)"
    )
    with servers.serving(["-c", code], servers.split_cores()[0]) as server:
        parent, child = server.processes()
        assert (server.grpc, server.address) == (Address("127.0.0.1", 8), Address("127.0.0.1", 9))
        assert parent == server.pid
        assert server.rss_bytes() > 1 << 20
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_ratio_is_paired_by_round() -> None:
    found = ratio([4.0, 6.0, 200.0], [2.0, 3.0, 100.0])
    assert (found.low, found.value, found.high) == pytest.approx((2.0, 2.0, 2.0))
    found = ratio([8.0, 9.0, 100.0], [2.0, 3.0, 4.0])
    assert found.value == pytest.approx(300 ** (1 / 3))
    assert found.low < found.value < found.high
