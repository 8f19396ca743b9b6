"""``register_op``: definitions of torch operators, from a file or from the program."""

import textwrap
import zipfile

import numpy as np
import pytest

import penstock
from penstock.artifact import Artifact
from penstock.engines.custom_ops import custom_ops
from penstock.errors import InvalidArgument, NotFound, Unsupported
from penstock.offline.convert.base import ConvertOptions, InputSpec, UnsupportedOperators
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
    monkeypatch.setattr("penstock.engines.custom_ops._registered", {})


def opened(text, tmp_path, module=None):
    (tmp_path / "my_ops.py").write_text(textwrap.dedent(text))
    options = ConvertOptions(inputs=(InputSpec("x", DataType.FP32, ("N", 4)),), ops=tmp_path / "my_ops.py")
    return CONVERTER.open(module or Clipped(), options)


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


INNER = """
    import penstock, torch

    @penstock.register_op("aten::_linalg_svd")
    def svd(A, full_matrices=False, compute_uv=True, *, driver=None):
        return A, A.norm(dim=-1), A  # of a matrix with one row
"""
OVERLOADED = """
    import penstock, torch

    @penstock.register_op("aten::special_hermite_polynomial_h")
    def hermite(x, n):
        return 2 * x
"""


@pytest.mark.parametrize(
    ("text", "function"),
    [
        (INNER, lambda x: torch.linalg.svdvals(torch.unsqueeze(x, 1))),
        (OVERLOADED, lambda x: torch.special.hermite_polynomial_h(x, 1)),
    ],
)
def test_the_operator_that_the_message_names_is_the_one_to_define(text, function, tmp_path):
    class Net(torch.nn.Module):
        def forward(self, x):
            return function(x)

    with pytest.raises(UnsupportedOperators) as caught:
        opened("", tmp_path, Net()).export(tmp_path / "model.onnx", 21)
    (one,) = caught.value.operators
    named = text.partition('("')[2].partition('"')[0]
    assert f"register_op('{named}" in one.way_out
    source = opened(text, tmp_path, Net())
    source.export(tmp_path / "model.onnx", 21)
    feeds = {"x": np.linspace(-5, 5, 12, dtype=np.float32).reshape(3, 4)}
    with loaded(Artifact.from_file(tmp_path / "model.onnx")) as model:
        np.testing.assert_allclose(model.forward(feeds)["OUTPUT__0"], source.forward(feeds)["OUTPUT__0"], rtol=1e-5)


def test_scripted_modules_take_no_definitions(tmp_path):
    class Net(torch.nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x)

    with pytest.raises(UnsupportedOperators) as caught:
        opened("", tmp_path, torch.jit.script(Net())).export(tmp_path / "model.onnx", 21)
    (one,) = caught.value.operators
    assert "give the module instead of TorchScript, and define it with" in one.way_out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero \\(my_ops.py:1\\)"),
        ("\nraise SystemExit(3)", "SystemExit: 3 \\(my_ops.py:2\\)"),
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


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (TORCH.replace("return limit *", "return missing *"), r"raised NameError: .*'missing' .*\(my_ops.py:6\)"),
        (TORCH.replace("(x, limit)", "(x)"), r"raised TypeError: soft_clip\(\) takes 1 .*\(my_ops.py:4\)"),
        (
            TORCH.replace("tanh(x / limit)", "tanh(x / limit).double()"),
            r"returns \['torch.float64'\], but the operator",
        ),
        (TORCH.replace("return", "return x,"), r"returns \['torch.float32', 'torch.float32'\], but the operator"),
        (ONNX.replace("op.Tanh", "missing.Tanh"), r"raised NameError: .*'missing' .*\(my_ops.py:8\)"),
        (ONNX.replace("(x, limit: float)", "(x)"), r"raised TypeError: .*soft_clip\(\) .*\(my_ops.py:6\)"),
    ],
)
def test_a_wrong_definition_is_reported_with_its_line(text, cause, tmp_path):
    with pytest.raises(InvalidArgument, match="the definition of 'penstock_test::soft_clip' " + cause) as caught:
        opened(text, tmp_path).export(tmp_path / "model.onnx", 21)
    assert "penstock_test::soft_clip(Tensor x, float limit) -> Tensor" in caught.value.hint


def test_a_program_that_lacks_its_library_lists_all_absent_operators(tmp_path):
    program = torch.export.export(Clipped(), (torch.ones(2, 4),))
    torch.export.save(program, tmp_path / "clipped.pt2")
    with zipfile.ZipFile(tmp_path / "clipped.pt2") as whole, zipfile.ZipFile(tmp_path / "net.pt2", "w") as changed:
        for name in whole.namelist():
            content = whole.read(name).replace(b"penstock_test.soft_clip", b"absent_lib.soft_clip")
            changed.writestr(name, content.replace(b"torch.ops.aten.add.", b"torch.ops.absent_lib.added."))
    with pytest.raises(UnsupportedOperators) as caught:
        CONVERTER.open(tmp_path / "net.pt2", ConvertOptions())
    assert [one.op for one in caught.value.operators] == ["absent_lib::soft_clip", "absent_lib::added"]
    assert "import the library that defines it" in caught.value.hint


def test_the_file_of_operators_runs_before_a_program_is_read(tmp_path):
    torch.export.save(torch.export.export(Clipped(), (torch.ones(2, 4),)), tmp_path / "net.pt2")
    (tmp_path / "my_ops.py").write_text("raise RuntimeError('it runs first')")
    with pytest.raises(InvalidArgument, match="it runs first"):
        CONVERTER.open(tmp_path / "net.pt2", ConvertOptions(ops=tmp_path / "my_ops.py"))
    (tmp_path / "my_ops.py").write_text(textwrap.dedent(TORCH))
    source = CONVERTER.open(tmp_path / "net.pt2", ConvertOptions(ops=tmp_path / "my_ops.py"))
    source.export(tmp_path / "model.onnx", 21)
