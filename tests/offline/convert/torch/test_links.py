"""Links name layers and lines."""

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.parity.parity import certify

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


def chain():
    """Layers with values as small as those of a transformer with random weights."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8, eps=1e-12), nn.Linear(8, 6))
    for one in layers.parameters():
        nn.init.normal_(one, std=0.02)
    return layers.eval()


def test_values_are_computed_from_other_values(tmp_path):
    source = opened(chain(), x("N", 6))
    exported = source.export(tmp_path / "model.onnx", 21)
    assert exported.has_parts
    names = [link.source for link in exported.links]
    inputs = {"x": np.ones((2, 6), np.float32)}
    found = source.values(inputs, names)
    for before, after in itertools.pairwise(names):
        (again,) = source.values({before: found[before]}, [after]).values()
        np.testing.assert_array_equal(again, found[after])
    changed = source.values({names[0]: found[names[0]] * 2}, [names[1]])[names[1]]
    assert not np.allclose(changed, found[names[1]])
    with pytest.raises(PenstockError):
        source.values({names[1]: found[names[1]]}, [names[0]])


def test_weights_are_values_without_inputs(tmp_path):
    module = chain()
    source = opened(module, x("N", 6))
    exported = source.export(tmp_path / "model.onnx", 21)
    stored = {name: tensor for name, tensor in module.state_dict().items() if tensor.numel() > 1}
    assert [name.removeprefix("module.") for name in exported.weights] == list(stored)
    for name in exported.weights:
        (weight,) = source.values({}, [name]).values()
        np.testing.assert_array_equal(weight, stored[name.removeprefix("module.")].numpy())


@pytest.mark.parametrize("fault", ["tanh", "epsilon", "0.weight", "2.weight", "3.weight", "3.bias"])
def test_faults_without_effect_on_small_values_are_found(tmp_path, fault):
    source, target = opened(chain(), x("N", 6)), tmp_path / "model.onnx"
    exported = source.export(target, 21)
    assert certify(Artifact.from_file(target), source, exported, ConvertOptions()).holds
    model = onnx.load(target)
    nodes = {node.op_type: node for node in model.graph.node}
    if fault == "tanh":
        nodes["Gelu"].ClearField("attribute")
        nodes["Gelu"].attribute.append(onnx.helper.make_attribute("approximate", "tanh"))
    elif fault == "epsilon":
        next(one for one in nodes["LayerNormalization"].attribute if one.name == "epsilon").f *= 10
    for tensor in model.graph.initializer:
        if tensor.name.endswith(fault):
            changed = onnx.numpy_helper.to_array(tensor).copy()
            changed.flat[1] *= np.float32(1.0001)
            tensor.CopyFrom(onnx.numpy_helper.from_array(changed, tensor.name))
    changed = Artifact.from_bytes(model.SerializeToString())
    found = certify(changed, source, exported, ConvertOptions())
    assert found.first_divergent is not None
