"""Every call starts from the same state."""

import numpy as np
import pytest

from benchmarks.zoo.torch import MODELS

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch_conversions import CONVERTER, feeds_of, torch

nn = torch.nn
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)


def test_calls_do_not_depend_on_earlier_calls(tmp_path):
    source = CONVERTER.open(MODELS["counter"].make(tmp_path), MODELS["counter"].options)
    feeds = feeds_of(source, 2, 0)
    first, second = source.forward(feeds), source.forward(feeds)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert "['calls', 'mean']" in source.export(tmp_path / "model.onnx", 21).warnings[0]
