"""What tf2onnx cannot convert, and how the user can help."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

pytest.importorskip("tf2onnx")
tf = pytest.importorskip("tensorflow")

from penstock.errors import Unsupported  # noqa: E402
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


def test_old_opsets_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="opset 9"):
        opened("saved_linear", folder).export(tmp_path / "model.onnx", 9)
