"""``--ops``: models with operators in Python, from the command line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from penstock.tensor import DataType
from processes import ServerProcess

OPS = """
import penstock

print("from the file")

@penstock.register_op("penstock_cli::triple", form="python", inputs=["float32"], outputs=["float32"])
def triple(x):
    return 3 * x
"""


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engines.custom_ops._registered", {})
    monkeypatch.setattr("penstock.engines.custom_ops._files", {})
    monkeypatch.chdir(tmp_path)
    x, y = (helper.make_tensor_value_info(name, DataType.FP32.onnx, ["N", 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("triple", ["x"], ["y"], domain="penstock_cli")], "graph", [x], [y])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("penstock_cli", 1)]
    Path("net.onnx").write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
    Path("ops.py").write_text(OPS)
    np.savez("data.npz", x=np.ones((4, 2), np.float32))


@pytest.fixture
def _extensions() -> None:
    pytest.importorskip(
        "penstock.engines.extensions", reason="the extra penstock[extensions] is not installed", exc_type=ImportError
    )


@pytest.mark.usefixtures("_extensions")
def test_infer_runs_the_file_and_prints_only_the_answer(penstock) -> None:
    found = penstock("infer", "net.onnx", "--inputs", "data.npz", "--ops", "ops.py", "--outputs", "out.npz", "--json")
    assert found.json["rows"] == 4
    with np.load("out.npz") as out:
        np.testing.assert_array_equal(out["y"], np.full((4, 2), 3, np.float32))


def test_without_the_option_the_error_names_it(penstock) -> None:
    done = penstock("infer", "net.onnx", "--inputs", "data.npz")
    assert done.code == 2
    assert "needs the operator 'penstock_cli::triple'" in done.err
    assert "--ops" in done.err


def test_a_missing_file_is_named(penstock) -> None:
    done = penstock("infer", "net.onnx", "--inputs", "data.npz", "--ops", "absent.py")
    assert done.code == 3
    assert "no file 'absent.py' with operators" in done.err


@pytest.mark.usefixtures("_extensions")
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_serve_runs_the_file_also_in_the_processes_of_models(isolation: str) -> None:
    arguments = ("--ops", os.path.abspath("ops.py"), "--isolation", isolation)
    with ServerProcess(Path("net.onnx").absolute(), arguments=arguments) as server:
        assert server.line.startswith("ready"), server.end()
