"""Masked attention as torch computes it."""

import numpy as np
import pytest

from penstock.tensor import DataType

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch_conversions import opened, run, torch, x

nn = torch.nn
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)


@pytest.mark.parametrize("datatype", [DataType.BOOL, DataType.FP32])
def test_queries_without_keys_give_0(datatype, tmp_path):
    def attend(q, mask):
        return nn.functional.scaled_dot_product_attention(q, q, q, mask)

    source = opened(attend, x("N", 2, "L", 4, name="q"), x("N", 1, 1, "L", name="mask", datatype=datatype))
    source.export(tmp_path / "model.onnx", 21)
    kept = np.array([[0, 0, 0], [1, 0, 1]], bool).reshape(2, 1, 1, 3)
    mask = kept if datatype is DataType.BOOL else np.where(kept, 0, -np.inf).astype(np.float32)
    feeds = {"q": np.ones((2, 2, 3, 4), np.float32), "mask": mask}
    found, wanted = run(tmp_path / "model.onnx", feeds)["OUTPUT__0"], source.forward(feeds)["OUTPUT__0"]
    assert not found[0].any()
    np.testing.assert_allclose(found, wanted)
