"""Examples of the declared inputs, and declarations that do not fit."""

import numpy as np
import pytest

from penstock.errors import InvalidArgument
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.tensor import DataType

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch_conversions import CONVERTER, Affine, opened, run, torch, x

nn = torch.nn
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)


def test_a_sample_of_one_row_with_a_free_axis(tmp_path):
    sample = {"x": np.ones((1, 4), np.float32)}
    source = CONVERTER.open(Affine(), ConvertOptions(sample=sample, dynamic={"x": {0: "N"}}))
    source.export(tmp_path / "model.onnx", 21)
    assert run(tmp_path / "model.onnx", {"x": np.ones((3, 4), np.float32)})["mean"].shape == (3,)


@pytest.mark.parametrize(
    ("inputs", "message", "hint"),
    [
        ((), "does not say which inputs", '--inputs "x:float32'),
        ((x("N", 4, name="a"), x("N", 4, name="b")), "takes 1", ""),
        ((x("N", 5),), "rejects the inputs", "--sample"),
        ((InputSpec("x", None, None),), "shape of input 'x' is unknown", "[N,4]"),
        ((x("N", 4, datatype=DataType.BYTES),), "strings", ""),
        ((x("N", 4, datatype=DataType.INT64),), "rejects the inputs", "--inputs"),
    ],
)
def test_wrong_inputs(inputs, message, hint):
    module = nn.Sequential(Affine()) if not inputs else Affine()
    with pytest.raises(InvalidArgument, match=message) as caught:
        opened(module, *inputs)
    assert (hint.replace("x:", "input:") if not inputs else hint) in caught.value.hint
