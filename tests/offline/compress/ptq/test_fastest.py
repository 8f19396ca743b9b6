"""All placements are timed and ranked. No assertion depends on the speed of this machine."""

from __future__ import annotations

import numpy as np
import pytest

import networks
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.fastest import candidate_schemes, fastest_placement
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.resources import MachineFacts, machine_facts
from penstock.tensor import DataType

DATA = make_dataset({"x": networks.images(8)}, None)
QUICK_S = 0.05


def test_every_placement_and_scheme_is_ranked() -> None:
    artifact = networks.cnn(8)
    timed = fastest_placement(
        artifact, collect(artifact, DATA.inputs), DATA, candidate_schemes(machine_facts()), budget_s=QUICK_S
    )
    assert len(timed) == 4
    assert [one.p50_ms for one in timed] == sorted(one.p50_ms for one in timed)
    assert {(one.placement, one.scheme.activation) for one in timed} == {
        (placement, activation)
        for placement in (QdqPlacement.LINEAR, QdqPlacement.WIDE)
        for activation in (DataType.UINT8, DataType.INT8)
    }
    for one in timed:
        assert one.speedup.low <= one.speedup.value <= one.speedup.high
        assert get_engine("onnxruntime").load(one.artifact, {}).forward(DATA.rows(0, 1))["y"].shape == (1, 10)


def test_what_is_written_the_same_is_timed_once() -> None:
    artifact, x = networks.mlp(), np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    data = make_dataset({"x": x}, None)
    schemes = candidate_schemes(machine_facts())[:1]
    timed = fastest_placement(artifact, collect(artifact, data.inputs), data, schemes * 2, budget_s=QUICK_S)
    assert len({one.artifact.digest for one in timed}) == len(timed) == 1


def test_fixed_batch_and_no_schemes() -> None:
    artifact = networks.cnn(8, batch=2)
    statistics = collect(artifact, DATA.inputs)
    assert fastest_placement(artifact, statistics, DATA, candidate_schemes(machine_facts())[:1], budget_s=QUICK_S)
    with pytest.raises(InvalidArgument, match="'schemes' is empty"):
        fastest_placement(artifact, statistics, DATA, [], budget_s=QUICK_S)


@pytest.mark.parametrize("isa", [("avx2",), ("avx512_vnni",)])
def test_no_scheme_saturates(isa: tuple[str, ...]) -> None:
    machine = MachineFacts("cpu", "x86_64", isa, 1, 0, 1, "Linux", "3.11")
    assert [one.reduce_range for one in candidate_schemes(machine)] == [isa == ("avx2",)] * 2
