"""The parts of the scenario of the repository drive a real server, and tell when a goal does not hold."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from benchmarks import models
from benchmarks.repository import beside, many
from benchmarks.repository.control import Control, add, replace, repository_server
from benchmarks.repository.memory import grown
from benchmarks.repository.reload import Operations, rows
from benchmarks.scenarios import SCENARIOS, repository
from benchmarks.servers import Server, split_cores
from penstock.perf.oip_client import infer_all
from penstock.perf.tally import OpenLoopResult

EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "small")
QUIET = OpenLoopResult(
    throughput=100, p50_ms=1, p95_ms=2, p99_ms=3, p999_ms=4, mean_ms=1, max_ms=5, requests=100, errors=0, errors_by_kind={},
    duration_s=1, client_cpu=0.1, rate=100, offered_rate=100, connections=1,
)  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    add(tmp_path / "models", "small", models.mlp(tmp_path / "small.onnx"))
    return tmp_path / "models"


def test_files_are_replaced_in_one_step(root: Path, tmp_path: Path) -> None:
    file = root / "small" / "1" / "model.onnx"
    before = file.stat()
    replace(root, "small", models.mlp(tmp_path / "other.onnx", seed=1))
    assert file.read_bytes() == (tmp_path / "other.onnx").read_bytes() != (tmp_path / "small.onnx").read_bytes()
    assert file.stat().st_ino != before.st_ino
    assert [path.name for path in file.parent.iterdir()] == ["model.onnx"]


def test_models_are_controlled_and_measured(root: Path, tmp_path: Path) -> None:
    files = [models.mlp(tmp_path / f"{seed}.onnx", seed=seed) for seed in (1, 2)]
    for name in ("large", "mlp_changes", "cnn_changes", "mlp_leaves", "cnn_leaves", "mlp_grows"):
        add(root, name, files[0])

    async def drive(server: Server) -> None:
        control = Control(server.address)
        with pytest.raises(RuntimeError, match="HTTP 400.*no model 'missing'|failed to load 'missing'"):
            await control.load("missing")
        done = Operations(root, {"mlp_changes": files[::-1], "cnn_changes": files[::-1]}, control)
        while done.count < 12:  # each kind at least once
            await done.work(0.01)
        assert {*done.seconds} == {
            "mlp: reload", "cnn: reload", "mlp: load", "cnn: load", "mlp: unload", "cnn: unload", "instances",
        }  # fmt: skip
        row = await grown(server, "thread", (1, 2))
        assert row.value is not None
        assert "after 1, 2 cycles" in row.note
        control.close()

    with repository_server(root, split_cores()[0], *EXPLICIT) as server:
        asyncio.run(drive(server))


@pytest.mark.parametrize(
    ("busy", "lost", "holds"),
    [(3.0, 0, [True, True, True]), (6.0, 0, [True, True, False]), (3.0, 2, [False, True, True])],
    ids=["as before", "slower", "failed"],
)
def test_what_others_feel_is_judged(busy: float, lost: int, holds: list[bool]) -> None:
    slow = msgspec.structs.replace(QUIET, p99_ms=busy, errors=lost)
    done = Operations(Path(), {}, Control.__new__(Control))
    found = rows({"quiet": [QUIET] * 5, "busy": [slow] * 6}, [QUIET] * 10, done, 1000, "one core")
    assert [row.holds for row in found if row.holds is not None] == holds


def test_models_beside_each_other_answer(tmp_path: Path) -> None:
    root = tmp_path / "models"
    beside.fill(tmp_path, root)
    with repository_server(root, split_cores()[0]) as server:
        row = {"input": beside.ROW}
        answers = {
            name: asyncio.run(infer_all(server.address, name, [row]))[0] for name in ("ensemble", "python", "onnx")
        }
        assert answers["python"]["output"].tolist() == answers["onnx"]["output"].tolist() == beside.ROW.tolist()
        assert answers["ensemble"]["output"].shape == beside.ROW.shape


@pytest.mark.slow
def test_many_models() -> None:
    found = many.many(quick=True)
    assert [row.unit for row in found] == ["s", "ms", "ms", "%", "KiB"]
    assert all(row.value is not None and row.value >= 0 for row in found)


def test_the_scenario_is_run_with_all_others() -> None:
    assert "repository" in SCENARIOS
    assert {*repository.PARTS} == {"reload", "memory", "many", "beside"}
