from __future__ import annotations

from pathlib import Path

import pytest

from caffe_networks import image, opened
from penstock.errors import InvalidModel


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("Convolution", "convolution_param { num_output: 4 kernel_size: 3 }", "needs 2 blob"),
        ("Convolution", "convolution_param { num_output: 4 }", "'kernel_size' is"),
        (
            "Convolution",
            "convolution_param { num_output: 3 kernel_size: 3 group: 2 }",
            "cannot be divided into 2 group",
        ),
        ("Convolution", "convolution_param { num_output: 4 kernel_size: 3 pad: 1000000000 }", "needs 2 blob"),
        ("Pooling", "pooling_param { kernel_size: 2 stride: 0 }", "'stride' is"),
        ("Pooling", "pooling_param { kernel_size: 2 pad: 2 }", "lies outside"),
        ("Pooling", "pooling_param { kernel_size: 1 stride: 7 }", "lies outside"),
        ("LRN", "lrn_param { local_size: 4 }", "must be an odd number"),
        ("Concat", "concat_param { axis: 9 }", "'axis' is 9, but its input has 4 dimensions"),
        ("Slice", "slice_param { slice_point: 9 }", "does not divide 2 into 1 part|does not divide 2"),
        ("Reshape", "reshape_param { shape { dim: 7 } }", "cannot reshape"),
        ("Tile", "tile_param { tiles: 1000000000 }", "too large"),
        ("Permute", "permute_param { order: 0 order: 0 }", "'order' is"),
        ("Eltwise", "eltwise_param { coeff: 1 coeff: 2 }", "2 coefficient"),
        ("Log", "log_param { base: -3 }", "'base' must be positive"),
        ("PriorBox", "prior_box_param { min_size: -1 }", "do not fit|unpack"),
        ("InnerProduct", "inner_product_param { num_output: 4 }", "needs 1 blob"),
    ],
)
def test_wrong_parameters_name_the_layer(kind: str, text: str, message: str, tmp_path: Path) -> None:
    net = image(1, 2, 6, 6)
    net.add("guilty", kind, "data", text)
    net.weights["other"] = [net.random(1)]
    with pytest.raises(InvalidModel, match=message) as caught:
        opened(net, tmp_path)
    assert f"layer 'guilty' ({kind}, line 2)" in caught.value.message
