"""One diagnosis for all exporters that failed."""

import pytest

from benchmarks.zoo.torch import MODELS
from penstock.errors import PenstockError
from penstock.offline.convert.base import UnsupportedOperators

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch_conversions import CONVERTER, opened, torch, x

nn = torch.nn
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)


def test_every_operator_without_a_conversion_is_listed_with_its_line(tmp_path):
    model = MODELS["unconvertible"]
    source = CONVERTER.open(model.make(tmp_path), model.options)
    with pytest.raises(UnsupportedOperators, match="2 operator") as caught:
        source.export(tmp_path / "model.onnx", 21)
    assert [one.op for one in caught.value.operators] == ["aten::_linalg_svd", "aten::special_i1"]
    assert all("torch_modules.py" in one.where and "register_op" in one.way_out for one in caught.value.operators)
    assert not list(tmp_path.iterdir())


def test_a_decision_on_values_that_cannot_be_scripted_is_diagnosed(tmp_path):
    def decide(x):
        return x * 2 if x.sum().item() > 0 and [].__class__ else x

    source = opened(decide, x("N", 4))
    with pytest.raises(PenstockError, match="depends on the values of a tensor") as caught:
        source.export(tmp_path / "model.onnx", 21)
    assert "test_diagnosis.py" in caught.value.message
    assert "torch.cond" in caught.value.hint
    assert not list(tmp_path.iterdir())
