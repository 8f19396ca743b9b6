"""Bodies of control-flow nodes that compute in FP16."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fault_graphs import make
from penstock.offline.convert.parity.nodes import Nodes
from penstock.offline.convert.parity.tolerance import RoundingModel
from tests.compared import checked, parsed


@pytest.mark.parametrize("name", ["half_branch", "half_loop"])
def test_the_noise_within_a_body_is_that_of_fp16(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    rounding = RoundingModel(Nodes(make(name)), {"x": x}, ["y"])
    assert rounding.is_coarse
    spread = max(np.abs(one - rounding.exact("y")).max() for one in rounding.noisy("y"))
    assert 1e-4 < spread < 2e-2


def test_a_scan_gives_the_results_of_its_engine() -> None:
    model = parsed(
        "g (float[5,3] x, float[3] s) => (float[3] t, float[3,5] y) { t, y = Scan<num_scan_inputs=1,scan_output_axes=[1],"
        "scan_input_directions=[1], body = b (float[3] a, float[3] r) => (float[3] c, float[3] d) "
        "{ h = Cast<to=10>(r) w = Cast<to=1>(h) c = Add(a, w) d = Mul(c, w) }>(s, x) }"
    )
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((5, 3)).astype("f"), "s": rng.standard_normal(3).astype("f")}
    nodes = Nodes(model)
    written, precise = nodes.run(given, ["t", "y"]), nodes.run(given, ["t", "y"], precise=True)
    for name in ("t", "y"):
        np.testing.assert_allclose(written[name], precise[name], atol=1e-5)


def test_models_with_such_bodies_hold_with_other_rounding() -> None:
    for seed in range(3):
        assert checked(make("half_branch"), make("half_branch"), seed=seed).holds
