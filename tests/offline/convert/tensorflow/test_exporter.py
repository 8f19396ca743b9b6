"""What tf2onnx cannot convert, and how the user can help."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

pytest.importorskip("tf2onnx")
tf = pytest.importorskip("tensorflow")

from penstock.errors import InvalidArgument, Unsupported  # noqa: E402
from penstock.offline.convert.base import UnsupportedOperators  # noqa: E402
from tensorflow_conversions import opened  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_unsupported_operators_are_listed_all_at_once(folder: Path) -> None:
    model = opened("saved_unsupported", folder)
    with pytest.raises(UnsupportedOperators) as caught:
        model.export(folder / "unsupported.onnx", 21)
    assert {one.op for one in caught.value.operators} == {"Svd", "BesselI0e"}
    assert not (folder / "unsupported.onnx").exists()


def test_an_operator_from_the_users_file_is_used(folder: Path, tmp_path: Path) -> None:
    ops = tmp_path / "my_ops.py"
    ops.write_text(
        "from tf2onnx.handler import tf_op\n"
        "@tf_op(['Svd', 'BesselI0e'])\n"
        "class Handler:\n"
        "    @classmethod\n"
        "    def version_1(cls, ctx, node, **kwargs):\n"
        "        node.type = 'Identity'\n"
        "        for name in list(node.attr):\n"
        "            del node.attr[name]\n"
    )
    model = opened("saved_unsupported", folder, ops=ops, outputs=("root",))
    model.export(tmp_path / "model.onnx", 21)
    assert [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node] == ["Identity"]


IN_PYTHON = """
import numpy as np, penstock

@penstock.register_op("tf::BesselI0e", form="{form}", inputs=["{kind}"], outputs=["float32"])
def bessel(x):
    return (np.i0(x) * np.exp(-np.abs(x))).astype(np.float32)
"""


@pytest.fixture
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engines.custom_ops._registered", {})


@pytest.mark.usefixtures("_forget")
def test_an_operator_in_python_becomes_a_node(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(IN_PYTHON.format(form="python", kind="float32"))
    model = opened("saved_unsupported", folder, ops=tmp_path / "ops.py", outputs=("root",))
    assert model.export(tmp_path / "model.onnx", 21).python_ops == ("tf::BesselI0e",)
    (node,) = onnx.load(tmp_path / "model.onnx").graph.node
    assert (node.domain, node.op_type, len(node.attribute)) == ("tf", "BesselI0e", 0)


@pytest.mark.usefixtures("_forget")
def test_wrong_definitions_of_operators_in_python_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(IN_PYTHON.format(form="python", kind="float64"))
    model = opened("saved_unsupported", folder, ops=tmp_path / "ops.py", outputs=("root",))
    with pytest.raises(UnsupportedOperators) as caught:
        model.export(tmp_path / "model.onnx", 21)
    assert "'tf::BesselI0e' in ops.py declares other inputs than the graph has, FLOAT" in caught.value.hint
    (tmp_path / "ops.py").write_text("import penstock\npenstock.register_op('tf::BesselI0e')(print)")
    with pytest.raises(InvalidArgument, match="with the form 'torch'"):
        opened("saved_unsupported", folder, ops=tmp_path / "ops.py").export(tmp_path / "model.onnx", 21)


def test_old_opsets_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="opset 9"):
        opened("saved_linear", folder).export(tmp_path / "model.onnx", 9)
