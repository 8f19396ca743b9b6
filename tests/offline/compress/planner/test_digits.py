"""Plans with the real steps, on the digits example."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import helper

import networks
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.offline.compress.planner import gain
from penstock.offline.compress.planner import plan as module
from penstock.offline.compress.planner.plan import CompressionPlan, PlanOptions, plan
from penstock.offline.compress.planner.route import Stage, stages
from penstock.offline.compress.training.memory import training_bytes
from penstock.offline.judge.contract import Contract
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.optimizer import optimize

pytest.importorskip("torch")

DIGITS = Path(__file__).parents[4] / "examples/digits"
SIZE = PlanOptions(contract=Contract(0.03, max_output_error=0.3), target="size", budget_s=1000, epochs=1)


@pytest.fixture(autouse=True)
def _short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gain, "_TIMING_S", 0.05)


@pytest.fixture(scope="module")
def data() -> Dataset:
    with np.load(DIGITS / "calibrate.npz") as arrays:
        return make_dataset({"image": arrays["image"]}, arrays["labels"])


@pytest.fixture(scope="module")
def digits(data: Dataset) -> Artifact:
    return optimize(Artifact.from_file(DIGITS / "model.onnx"), [data.rows(0, 1)])[0]


def route(target: str, *names: str) -> tuple[Stage, ...]:
    """The stages that begin with these steps, without later stages."""
    found = stages("size" if target == "size" else "latency")
    return tuple(Stage(one.moves, one.order) for one in found if one.moves[0].name in names)


def outcomes(found: CompressionPlan) -> dict[str, str]:
    return {attempt.name: attempt.outcome for attempt in found.attempts}


@pytest.mark.slow
def test_shared_weights_are_a_fraction_of_the_size(digits: Artifact, data: Dataset) -> None:
    found = plan(digits, data, SIZE, route=(Stage(stages("size")[0].moves[:1], "first"),))
    (attempt,) = found.attempts
    assert attempt.outcome == "kept"
    assert attempt.stored_bytes < digits.size_bytes / 6
    assert attempt.accuracy is not None
    assert attempt.accuracy.metric == "top-1"


def test_the_same_seed_gives_the_same_models() -> None:
    x = make_dataset({"x": np.random.default_rng(0).standard_normal((120, 16)).astype(np.float32)}, None)
    found, again = (plan(networks.mlp(), x, SIZE, route=route("size", "share-fine")) for _ in range(2))
    assert found.versions
    assert [v.artifact.digest for v in again.versions] == [v.artifact.digest for v in found.versions]


def test_int8_for_size_runs_anywhere(digits: Artifact, data: Dataset) -> None:
    found = plan(digits, data, SIZE, route=route("size", "int8"))
    assert outcomes(found) == {"int8": "kept"}
    (version,) = found.versions
    assert (version.precision, version.requires) == ("int8", ())
    weights = [tensor for tensor in read_proto(version.artifact).graph.initializer if len(tensor.dims) == 4]
    assert weights
    assert all(np.abs(onnx.numpy_helper.to_array(tensor)).max() <= 64 for tensor in weights)


def test_what_cannot_be_trained_fails_by_name_and_the_rest_goes_on() -> None:
    proto = read_proto(networks.mlp())
    proto.graph.node.append(helper.make_node("Det", ["square"], ["d"]))
    proto.graph.node.append(
        helper.make_node("Constant", [], ["square"], value=helper.make_tensor("s", 1, [2, 2], [1, 0, 0, 1]))
    )
    proto.graph.node.append(helper.make_node("Mul", ["y", "d"], ["z"]))
    proto.graph.node.sort(key=lambda node: node.op_type != "Constant")
    proto.graph.output[0].name = "z"
    model = Artifact.from_bytes(proto.SerializeToString())
    x = make_dataset({"x": np.random.default_rng(0).standard_normal((120, 16)).astype(np.float32)}, None)
    found = plan(model, x, SIZE, route=route("size", "share-fine", "prune"))
    by_name = {attempt.name: attempt for attempt in found.attempts}
    assert by_name["prune"].outcome == "failed"
    assert "Det" in by_name["prune"].reason
    assert by_name["share-fine"].outcome == "kept"


def test_training_that_does_not_fit_is_skipped(
    digits: Artifact, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = msgspec.structs.replace(module.machine_facts(), memory_bytes=training_bytes(digits, data, 32) // 2)
    monkeypatch.setattr(module, "machine_facts", lambda: small)
    found = plan(digits, data, SIZE, route=route("size", "prune"))
    (attempt,) = found.attempts
    assert attempt.outcome == "skipped"
    assert "training would need about" in attempt.reason


@pytest.mark.slow
def test_pruned_and_shared_resumed_equals_uninterrupted(digits: Artifact, data: Dataset, tmp_path: Path) -> None:
    pruned = (stages("size")[1],)
    whole = plan(digits, data, SIZE, route=pruned)
    ended = []

    def interrupt(_stage: str, done: int, _total: int) -> None:
        if done == 3 and not ended:
            ended.append(done)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(digits, data, SIZE, route=pruned, folder=tmp_path, on_progress=interrupt)
    assert list(tmp_path.glob("*.steps/level-*"))
    resumed = plan(digits, data, SIZE, route=pruned, folder=tmp_path)
    assert [a.digest for a in resumed.attempts] == [a.digest for a in whole.attempts]
    assert [v.artifact.digest for v in resumed.versions] == [v.artifact.digest for v in whole.versions]
    assert not list(tmp_path.glob("*.steps"))
    assert {a.outcome for a in whole.attempts if a.name in ("prune", "share-fine")} == {"kept"}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["latency", "size"])
def test_the_whole_route(digits: Artifact, data: Dataset, target: str) -> None:
    options = PlanOptions(contract=Contract(0.03), target=target, budget_s=90, epochs=1)  # type: ignore[arg-type]
    found = plan(digits, data, options)
    assert found.versions
    assert not any("internal error" in attempt.reason for attempt in found.attempts)
    assert any(attempt.name.startswith("shrink") for attempt in found.attempts)
