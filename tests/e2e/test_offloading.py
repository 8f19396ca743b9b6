"""A model on this device and on a real server, over a link that is cut."""

from pathlib import Path

import numpy as np
import onnx

from benchmarks.link import Link
from benchmarks.models import mlp, resnet18
from penstock import OffloadOptions, offload
from penstock.artifact import Artifact
from penstock.offline.split import cut_tensors, parts
from penstock.perf.http_client import Address
from tests.processes import ServerProcess

_SPARE_DEVICE = OffloadOptions(timeout_s=30, low_memory=1 << 60)
"""The server is preferred, because no device has so much memory free."""


def test_a_link_cut_during_a_request_is_answered_by_the_device(tmp_path: Path) -> None:
    row = {"input": np.random.default_rng(0).random((1, 32), np.float32)}
    model = mlp(tmp_path / "mlp.onnx")
    with (
        ServerProcess(model) as server,
        Link(Address(*server.address), 1e9, 0.0) as link,
        offload(model, link.address.url, options=_SPARE_DEVICE) as offloaded,
    ):
        expected = offloaded.infer(row)["output"]
        while not offloaded.counts.server:
            np.testing.assert_allclose(offloaded.infer(row)["output"], expected, atol=1e-6)
        link.cut()  # the connection hangs
        np.testing.assert_array_equal(offloaded.infer(row)["output"], expected)
        assert offloaded.counts.fallbacks == 1
        link.reset()  # connections are refused
        while not offloaded.server_error:
            np.testing.assert_array_equal(offloaded.infer(row)["output"], expected)
        link.mend()
        answered = offloaded.counts.server
        while offloaded.counts.server == answered:
            np.testing.assert_allclose(offloaded.infer(row)["output"], expected, atol=1e-6)
        assert not offloaded.server_error


def test_a_server_that_never_ran_is_no_error(tmp_path: Path) -> None:
    row = {"input": np.ones((1, 32), np.float32)}
    with offload(mlp(tmp_path / "mlp.onnx"), "http://127.0.0.1:1") as offloaded:
        assert offloaded.infer(row)["output"].shape == (1, 8)
        while not offloaded.server_error:
            offloaded.infer(row)
        assert "127.0.0.1:1" in offloaded.server_error


def test_a_split_model_gives_the_answers_of_the_whole(tmp_path: Path) -> None:
    image = {"input": np.random.default_rng(0).random((1, 3, 64, 64), np.float32)}
    model = resnet18(tmp_path / "resnet18.onnx", 64)
    cut = cut_tensors(onnx.load(model).graph)[8]
    for name, part in zip(("head", "tail"), parts(Artifact.from_file(model), cut), strict=True):
        (tmp_path / f"{name}.onnx").write_bytes(part.data)
    with (
        ServerProcess(tmp_path / "tail.onnx") as server,
        offload(
            model, "http://{}:{}".format(*server.address), head=tmp_path / "head.onnx", options=_SPARE_DEVICE
        ) as split,
    ):
        expected = split.infer(image)["output"]
        while not split.counts.server:
            np.testing.assert_allclose(split.infer(image)["output"], expected, rtol=1e-4, atol=1e-5)
        assert not split.server_error
