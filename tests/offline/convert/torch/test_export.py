"""The exporters, and what they write."""

import numpy as np
import onnx
import pytest

from benchmarks.zoo.torch import MODELS
from penstock.offline.convert.base import Axis, UnsupportedOperators

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch_conversions import CONVERTER, Affine, feeds_of, opened, run, torch, x

nn = torch.nn
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)


def test_free_dimensions_have_the_users_names(tmp_path):
    source = opened(Affine(), x("batch", 4))
    source.export(tmp_path / "model.onnx", 21)
    assert source.axes == {"x": (Axis(0, "batch"),)}
    assert [spec.shape for spec in source.signature.outputs] == [(-1, 3), (-1,)]
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [value.type.tensor_type.shape.dim[0].dim_param for value in (*graph.input, *graph.output)] == ["batch"] * 3


def test_an_old_opset_is_written_by_torchscript(tmp_path):
    source = opened(Affine(), x("N", 4))
    exported = source.export(tmp_path / "model.onnx", 15)
    assert exported.exporter.startswith("torch.onnx traced")
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 15
    feeds = feeds_of(source, 3, 0)
    values = source.values(feeds, [link.source for link in exported.links])
    found = run(tmp_path / "model.onnx", feeds, tuple(link.tensor for link in exported.links))
    assert len(values) == 2
    for link in exported.links:
        np.testing.assert_allclose(found[link.tensor], values[link.source], atol=1e-5)


def test_a_decision_on_a_size_holds_for_small_sizes(tmp_path):
    class Short(nn.Module):
        def forward(self, x):
            if x.shape[1] > 4:
                return x * 2
            return x + 10

    source = opened(Short(), x("N", "L"))
    exported = source.export(tmp_path / "model.onnx", 21)
    assert exported.exporter.startswith("torch.onnx scripted")
    for size in (1, 3, 4, 5, 40):
        feeds = {"x": np.ones((2, size), np.float32)}
        np.testing.assert_allclose(run(tmp_path / "model.onnx", feeds)["OUTPUT__0"], source.forward(feeds)["OUTPUT__0"])


def test_a_decision_on_a_size_holds_for_sizes_far_from_the_example(tmp_path):
    class Truncated(nn.Module):
        def forward(self, x):
            n = x.shape[1]
            if n > 1000:
                x = x[:, :1000]
            return x.cumsum(1)

    source = opened(Truncated(), x("N", "L"))
    exported = source.export(tmp_path / "model.onnx", 21)
    assert exported.exporter.startswith("torch.onnx scripted")
    (probe,) = source.probes(0).calls
    assert probe["x"].shape == (2, 1001)
    for size in (5, 1000, 1001, 1200):
        feeds = {"x": np.ones((2, size), np.float32)}
        np.testing.assert_allclose(run(tmp_path / "model.onnx", feeds)["OUTPUT__0"], source.forward(feeds)["OUTPUT__0"])


def test_a_decision_on_the_product_of_two_sizes_holds(tmp_path):
    class Large(nn.Module):
        def forward(self, x):
            if x.shape[0] * x.shape[1] > 5000:
                return x * 2
            return x + 10

    source = opened(Large(), x("N", "L"))
    source.export(tmp_path / "model.onnx", 21)
    for shape in ((2, 3), (70, 80), (2, 3000)):
        feeds = {"x": np.ones(shape, np.float32)}
        np.testing.assert_allclose(run(tmp_path / "model.onnx", feeds)["OUTPUT__0"], source.forward(feeds)["OUTPUT__0"])


def test_a_decision_on_a_size_holds_if_dynamo_cannot_capture_the_module(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x):
            if x.shape[1] > 200:
                x = x[:, :200]
            return self.layer(x)[0]

    source = opened(Recurrent(), x("N", "L", 4))
    source.export(tmp_path / "model.onnx", 21)
    for size in (3, 200, 201):
        feeds = {"x": np.ones((2, size, 4), np.float32)}
        found, wanted = run(tmp_path / "model.onnx", feeds)["OUTPUT__0"], source.forward(feeds)["OUTPUT__0"]
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_nothing_is_printed(tmp_path, capfd):
    source = CONVERTER.open(MODELS["decision"].make(tmp_path), MODELS["decision"].options)
    source.export(tmp_path / "model.onnx", 21)
    unconvertible = MODELS["unconvertible"]
    with pytest.raises(UnsupportedOperators):
        CONVERTER.open(unconvertible.make(tmp_path), unconvertible.options).export(tmp_path / "model.onnx", 21)
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("always")
def test_warnings_of_torch_are_not_shown(tmp_path, recwarn):
    class Warning(nn.Module):
        def forward(self, x):
            return nn.functional.softmax(x) * nn.functional.mse_loss(x, x[:1])

    source = opened(Warning(), x("N", 4))
    source.export(tmp_path / "model.onnx", 21)
    source.forward({"x": np.ones((3, 4), np.float32)})
    assert [str(one.message) for one in recwarn] == []
