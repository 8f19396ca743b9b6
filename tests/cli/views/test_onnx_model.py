from __future__ import annotations

from pathlib import Path

import onnx.parser
import pytest

import models

BRANCHES = """<ir_version: 8, opset_import: ["" : 17]>
m (float[n, 3] x) => (float[n, 3] y) {
    mean = ReduceMean <axes = [0], keepdims = 1> (x)
    sum = ReduceSum <keepdims = 0> (x)
    zero = Constant <value = float {0.0}> ()
    flag = Greater (sum, zero)
    y = If (flag) <
        then_branch = one () => (a) { a = Sub (x, mean) },
        else_branch = two () => (b) { c = Neg (x) b = Sub (c, mean) }
    >
}"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "linear.onnx"
    path.write_bytes(models.linear(3, 2).data)
    return path


def test_the_contents_of_a_model(penstock, model: Path) -> None:
    done = penstock("inspect", model)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("linear.onnx  ONNX, ")
    assert "opset ai.onnx " in lines[0]
    assert "input     x  FP32[N, 3]" in lines
    assert "output    y  FP32[N, 2]" in lines
    assert any(line.startswith("operators ") and "MatMul 1" in line for line in lines)
    assert lines[-1] == "rows      independent, so requests can be merged"


def test_subgraphs_count_and_the_node_that_joins_rows_is_named(penstock, tmp_path: Path) -> None:
    path = tmp_path / "branches.onnx"
    path.write_bytes(onnx.parser.parse_model(BRANCHES).SerializeToString())
    facts = penstock("inspect", path, "--json").json
    assert facts["operators"] == {"Sub": 2} | dict.fromkeys(
        ("Constant", "Greater", "If", "Neg", "ReduceMean", "ReduceSum"), 1
    )
    assert "ReduceMean" in facts["dependent_rows"]
    shown = penstock("inspect", path).out.splitlines()
    assert shown[-1].startswith(f"rows      not proven to be independent: {facts['dependent_rows']}; ")


def test_free_axes_have_the_names_that_the_model_gives_them(penstock, tmp_path: Path) -> None:
    path = tmp_path / "named.onnx"
    graph = "(float[b, t, 3] x, float[?, 3] z) => (float[b, t, 3] y, float[?, 3] w) { y = Neg (x) w = Neg (z) }"
    text = f'<ir_version: 8, opset_import: ["" : 17]> m {graph}'
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    lines = penstock("inspect", path).out.splitlines()
    assert "input     x  FP32[b, t, 3]" in lines
    assert "input     z  FP32[N, 3]" in lines
    assert "output    y  FP32[b, t, 3]" in lines
    assert penstock("inspect", path, "--json").json["axes"]["x"] == ["b", "t", ""]


def test_a_fixed_first_dimension_is_the_reason_and_no_setting_is_advised(penstock, tmp_path: Path) -> None:
    path = tmp_path / "fixed.onnx"
    path.write_bytes(models.fixed_batch().data)
    last = penstock("inspect", path).out.splitlines()[-1]
    assert "input 'x' of the model, [1, 3], has no free first dimension; export the model" in last
    assert "max_batch_size" not in last


def test_only_bundles_have_reports_and_only_models_are_read(penstock, model: Path, tmp_path: Path) -> None:
    done = penstock("inspect", model, "--report", tmp_path / "r.html")
    assert (done.code, "has no report" in done.err) == (2, True)
    model.write_bytes(b"not a model")
    done = penstock("inspect", model)
    assert (done.code, "Traceback" in done.err) == (2, False)
