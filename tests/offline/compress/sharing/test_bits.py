from __future__ import annotations

import numpy as np
import pytest

from networks import mlp
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidConfig
from penstock.offline.compress.sharing.bits import BitsOptions, choose_bits, only
from penstock.offline.compress.sharing.share import ShareOptions, share
from penstock.offline.judge.accuracy import answers, make_reference

DATA = make_dataset({"x": np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)}, None)


def test_each_layer_gets_the_fewest_bits_that_hold() -> None:
    options = BitsOptions(max_relative_error=0.05, max_accuracy_loss=0.02, least=2, most=6)
    seen: list[int] = []
    chosen = choose_bits(mlp(), DATA, options, ShareOptions(bits={"w4": 3}), lambda done, total: seen.append(total))
    assert seen == [2, 2]
    assert set(chosen.bits) == {"w0", "w2", "w4"}
    assert chosen.bits["w4"] == 3  # as was asked for
    engine = get_engine("onnxruntime")
    judge = make_reference(answers(engine.load(mlp(), {}), DATA), None)
    for name in ("w0", "w2"):
        holds = {}
        for bits in range(2, 7):
            shared = engine.load(share(mlp(), only(name, bits)), {})
            found = judge.compare(answers(shared, DATA))
            holds[bits] = found.relative_error <= 0.05
        assert chosen.bits[name] == min(bits for bits, held in holds.items() if held)


def test_where_no_number_of_bits_holds_it_is_the_most() -> None:
    strict = BitsOptions(max_relative_error=0.0, most=4)
    assert set(choose_bits(mlp(), DATA, strict).bits.values()) == {4}


@pytest.mark.parametrize("bad", [{"least": 0}, {"least": 5, "most": 4}, {"most": 13}, {"max_relative_error": -1.0}])
def test_bounds_that_cannot_be(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidConfig, match="least|most|max_relative_error"):
        choose_bits(mlp(), DATA, BitsOptions(**bad))
