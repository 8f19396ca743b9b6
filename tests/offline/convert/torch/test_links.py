"""Links name layers and lines."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch_conversions import Affine, opened, torch, x

nn = torch.nn
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)


def test_links_name_layers_and_lines(tmp_path):
    source = opened(Affine(), x("N", 4))
    exported = source.export(tmp_path / "model.onnx", 21)
    assert exported.exporter.startswith("torch.onnx dynamo 2")
    assert any("layer 'norm'" in link.where and "torch_conversions.py:" in link.where for link in exported.links)
