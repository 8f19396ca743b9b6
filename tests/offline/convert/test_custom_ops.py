"""``register_op``: definitions of torch operators, from a file or from the program."""

import textwrap

import numpy as np
import pytest

import penstock
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, NotFound, Unsupported
from penstock.offline.convert.base import ConvertOptions, InputSpec, UnsupportedOperators
from penstock.offline.convert.custom_ops import custom_ops
from penstock.offline.sessions import loaded
from penstock.tensor import DataType

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from penstock.offline.convert.frameworks.torch import CONVERTER  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)


@torch.library.custom_op("penstock_test::soft_clip", mutates_args=())
def soft_clip(x: torch.Tensor, limit: float) -> torch.Tensor:
    return limit * torch.tanh(x / limit)


@soft_clip.register_fake
def _(x, limit):
    return torch.empty_like(x)


class Clipped(torch.nn.Module):
    def forward(self, x):
        return soft_clip(x, 2.0) + 1


TORCH = """
    import penstock, torch

    @penstock.register_op("penstock_test::soft_clip")
    def soft_clip(x, limit):
        return limit * torch.tanh(x / limit)
"""
ONNX = """
    import penstock
    from onnxscript import FLOAT, script
    from onnxscript import opset18 as op

    def soft_clip(x, limit: float):
        bound = op.CastLike(limit, x)
        return op.Mul(op.Tanh(op.Div(x, bound)), bound)

    penstock.register_op("penstock_test::soft_clip", form="onnx")(soft_clip)
"""


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr("penstock.offline.convert.custom_ops._registered", {})


def opened(text, tmp_path):
    (tmp_path / "my_ops.py").write_text(textwrap.dedent(text))
    options = ConvertOptions(inputs=(InputSpec("x", DataType.FP32, ("N", 4)),), ops=tmp_path / "my_ops.py")
    return CONVERTER.open(Clipped(), options)


def test_an_unknown_operator_is_reported_with_the_way_out(tmp_path):
    with pytest.raises(UnsupportedOperators) as caught:
        opened("", tmp_path).export(tmp_path / "model.onnx", 21)
    (one,) = caught.value.operators
    assert one.op == "penstock_test::soft_clip"
    assert "test_custom_ops.py" in one.where
    assert "penstock.register_op('penstock_test::soft_clip')" in one.way_out


@pytest.mark.parametrize("text", [TORCH, ONNX])
def test_a_definition_converts_it(text, tmp_path):
    source = opened(text, tmp_path)
    source.export(tmp_path / "model.onnx", 21)
    feeds = {"x": np.linspace(-5, 5, 12, dtype=np.float32).reshape(3, 4)}
    with loaded(Artifact.from_file(tmp_path / "model.onnx")) as model:
        np.testing.assert_allclose(model.forward(feeds)["OUTPUT__0"], source.forward(feeds)["OUTPUT__0"], atol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero, line 1"),
        ("\nraise SystemExit(3)", "SystemExit: 3, line 2"),
        ("def (", "SyntaxError"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("import penstock\npenstock.register_op('clip')", "operator 'clip'"),
        ("import penstock\npenstock.register_op('a::b', form='python')", "form 'python'"),
    ],
)
def test_a_file_that_fails(text, message, tmp_path):
    with pytest.raises(InvalidArgument, match=message):
        opened(text, tmp_path)


def test_a_missing_file(tmp_path):
    with pytest.raises(NotFound):
        custom_ops(tmp_path / "none.py")


def test_an_operator_that_torch_does_not_have(tmp_path):
    source = opened("import penstock\n@penstock.register_op('penstock_test::none')\ndef f(x): return x", tmp_path)
    with pytest.raises(Unsupported, match="penstock_test::none"):
        source.export(tmp_path / "model.onnx", 21)


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_ops.py").write_text("LIMIT = 2")
    (tmp_path / "ops.py").write_text("import neighbour_of_ops")
    assert custom_ops(tmp_path / "ops.py") == ()


def test_the_decorator_returns_the_function():
    def double(x):
        return 2 * x

    assert penstock.register_op("penstock_test::double")(double) is double
    assert [one.name for one in custom_ops()] == ["penstock_test::double"]
