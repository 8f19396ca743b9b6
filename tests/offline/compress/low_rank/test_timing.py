from __future__ import annotations

from penstock.offline.compress.low_rank.timing import WHOLE, measure

from networks import Network
from penstock.offline.compress.low_rank.convolution import Form
from penstock.offline.compress.low_rank.layers import layers
from penstock.offline.optimize.model import load_model


def test_every_way_to_run_a_convolution_is_timed_at_its_shape() -> None:
    n = Network()
    n.op("Relu", n.conv("x", 8, 8), name="y")
    (layer,) = layers(load_model(n.artifact({"x": [1, 8, 6, 6]}, {"y": [1, 8, 6, 6]})))
    ways = [WHOLE, (Form.CHANNEL, (2,)), (Form.SPATIAL, (2,)), (Form.TUCKER, (2, 3))]
    found = measure(layer, (1, 8, 6, 6), ways, threads=1)
    assert list(found) == ways
    assert all(milliseconds > 0 for milliseconds in found.values())
