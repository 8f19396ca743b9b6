"""Flat inputs become the nested arguments of a module."""

import numpy as np
import pytest

from penstock.errors import InvalidArgument

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch_conversions import Packed, feeds_of, opened, run, torch, x

nn = torch.nn
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)


def test_arguments_are_nested_as_annotated(tmp_path):
    names = ("pair__left", "rest__0", "rest__1")
    source = opened(Packed(), *(x("N", 2, name=name) for name in names))
    source.export(tmp_path / "model.onnx", 21)
    assert source.signature.output_names == ["OUTPUT__0", "OUTPUT__2__size"]
    feeds = feeds_of(source, 3, 0)
    found = run(tmp_path / "model.onnx", feeds)
    np.testing.assert_allclose(found["OUTPUT__0"], source.forward(feeds)["OUTPUT__0"])
    assert found["OUTPUT__2__size"] == 3


def test_missing_inputs_are_named():
    with pytest.raises(InvalidArgument, match="needs the inputs \\['rest'\\]"):
        opened(Packed(), x("N", 2, name="pair__left"))
