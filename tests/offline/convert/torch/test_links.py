"""Links name layers and lines."""

from pathlib import Path

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


def test_the_model_does_not_name_the_folders_of_the_code(tmp_path):
    opened(Affine(), x("N", 4)).export(tmp_path / "model.onnx", 21)
    data = (tmp_path / "model.onnx").read_bytes()
    assert b'File \\"torch_conversions.py\\", line' in data or b'File "torch_conversions.py", line' in data
    assert str(Path(__file__).parents[3]).encode() not in data
    assert b"site-packages" not in data
