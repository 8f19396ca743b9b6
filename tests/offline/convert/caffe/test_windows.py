from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caffe_networks import compare, image, opened
from converted import differences
from penstock.errors import InvalidArgument, InvalidInput
from penstock.offline.convert.base import ConvertOptions


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["MAX", "AVE", "Convolution", "Deconvolution"]),
    size=st.tuples(st.integers(4, 12), st.integers(4, 12)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.integers(1, 4),
    pad=st.integers(0, 3),
    dilation=st.integers(1, 2),
)
def test_windows_of_any_geometry(
    kind: str,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: int,
    pad: int,
    dilation: int,
    tmp_path: Path,
) -> None:
    net = image(1, 2, *size)
    text = f"kernel_h: {kernel[0]} kernel_w: {kernel[1]} stride: {stride} pad: {pad}"
    if kind in ("MAX", "AVE"):
        net.add("y", "Pooling", "data", f"pooling_param {{ pool: {kind} {text} }}")
        net.weights["x"] = [net.random(1)]
    else:
        text = f"convolution_param {{ num_output: 4 group: 2 dilation: {dilation} {text} }}"
        net.add(
            "y",
            kind,
            "data",
            text,
            blobs=[net.random(*((4, 1) if kind == "Convolution" else (2, 2)), *kernel), net.random(4)],
        )
    try:
        source = opened(net, tmp_path, ConvertOptions(dynamic={"data": {0: "n", 2: "h", 3: "w"}}))
    except InvalidArgument:
        return  # a window larger than the image
    exported = source.export(tmp_path / "model.onnx", 21)
    for more in (0, 1, 3):
        array = np.random.default_rng(more).normal(size=(2, 2, size[0] + more, size[1] + 2 * more)).astype(np.float32)
        try:
            source.forward({"data": array})
        except InvalidInput:
            continue
        assert not differences(source, exported, tmp_path / "model.onnx", {"data": array})


def test_an_average_counts_the_padding_but_not_what_lies_behind_it(tmp_path: Path) -> None:
    net = image(1, 1, 4, 4)
    net.add("y", "Pooling", "data", "pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }")
    net.weights["x"] = [net.random(1)]
    found = compare(net, tmp_path, np.ones((1, 1, 4, 4)))["y"][0, 0]
    # The windows begin at -1, 1 and 3, and the image with its padding ends at 5.
    sides = np.array([2 / 3, 3 / 3, 1 / 2])
    np.testing.assert_allclose(found, np.multiply.outer(sides, sides), rtol=1e-6)


def test_lrn_by_its_formula(tmp_path: Path) -> None:
    net = image(1, 3, 1, 1)
    net.add("y", "LRN", "data", "lrn_param { local_size: 3 alpha: 6 beta: 0.5 k: 2 }")
    net.weights["x"] = [net.random(1)]
    found = compare(net, tmp_path, np.array([1, 2, 3]).reshape(1, 3, 1, 1))["y"].reshape(-1)
    squares = np.array([1 + 4, 1 + 4 + 9, 4 + 9])
    np.testing.assert_allclose(found, [1, 2, 3] / np.sqrt(2 + 6 / 3 * squares), rtol=1e-6)
