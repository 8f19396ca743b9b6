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
    for line in (
        "input     x  FP32[N, 3]  features (3 number(s) per row)",
        "output    y  FP32[N, 2]",
        "operators 1: MatMul 1",
        "weights   6 parameters, 24 B",
        "engine    onnxruntime runs it",
        "int8      1 of 1 linear operators would be quantised, with 100% of the weights and 100% of the multiply-adds",
        "rows      independent, so requests can be merged",
        "sample    accepted: x [1, 3]",
    ):
        assert line in lines, line
    assert lines[-1] == f"next      penstock build {model} --synthetic -o linear.bundle"


def test_subgraphs_count_and_the_node_that_joins_rows_is_named(penstock, tmp_path: Path) -> None:
    path = tmp_path / "branches.onnx"
    path.write_bytes(onnx.parser.parse_model(BRANCHES).SerializeToString())
    facts = penstock("inspect", path, "--json").json
    assert facts["operators"] == {"Sub": 2} | dict.fromkeys(
        ("Constant", "Greater", "If", "Neg", "ReduceMean", "ReduceSum"), 1
    )
    assert "ReduceMean" in facts["dependent_rows"]
    shown = penstock("inspect", path).out
    assert f"rows      not proven to be independent: {facts['dependent_rows']}; " in shown


def test_free_axes_have_the_names_that_the_model_gives_them(penstock, tmp_path: Path) -> None:
    path = tmp_path / "named.onnx"
    graph = "(float[b, t, 3] x, float[?, 3] z) => (float[b, t, 3] y, float[?, 3] w) { y = Neg (x) w = Neg (z) }"
    text = f'<ir_version: 8, opset_import: ["" : 17]> m {graph}'
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    lines = penstock("inspect", path).out.splitlines()
    assert any(line.startswith("input     x  FP32[b, t, 3]") for line in lines)
    assert any(line.startswith("input     z  FP32[N, 3]") for line in lines)
    assert "output    y  FP32[b, t, 3]" in lines
    assert penstock("inspect", path, "--json").json["axes"]["x"] == ["b", "t", ""]


def test_a_fixed_first_dimension_is_the_reason_and_no_setting_is_advised(penstock, tmp_path: Path) -> None:
    path = tmp_path / "fixed.onnx"
    path.write_bytes(models.fixed_batch().data)
    rows = next(line for line in penstock("inspect", path).out.splitlines() if line.startswith("rows"))
    assert "input 'x' of the model, [1, 3], has no free first dimension; export the model" in rows
    assert "max_batch_size" not in rows


def test_only_bundles_have_reports_and_only_models_are_read(penstock, model: Path, tmp_path: Path) -> None:
    done = penstock("inspect", model, "--report", tmp_path / "r.html")
    assert (done.code, "has no report" in done.err) == (2, True)
    model.write_bytes(b"not a model")
    done = penstock("inspect", model)
    assert (done.code, "Traceback" in done.err) == (2, False)


def test_what_an_engine_refuses_is_shown_with_the_reason(penstock, tmp_path: Path) -> None:
    path = tmp_path / "odd.onnx"
    path.write_bytes(models.unknown_operator().data)
    done = penstock("inspect", path)
    assert done.code == 0
    assert "engine    onnxruntime does not run it: " in done.out
    assert "next " not in done.out


def test_names_with_markup_are_shown_as_they_are(penstock, tmp_path: Path) -> None:
    evil = "[red]x[/red]"
    path = tmp_path / "evil.onnx"
    path.write_bytes(models.artifact([("Neg", [evil], ["y"])], [(evil, 1, ["N", 3])], [("y", 1, ["N", 3])]).data)
    done = penstock("inspect", path)
    assert done.code == 0
    assert f"input     {evil}  FP32[N, 3]" in done.out


def test_a_quantised_model_says_so(penstock, tmp_path: Path) -> None:
    path = tmp_path / "int8.onnx"
    path.write_bytes(models.product_of_bytes(3).data)
    assert "int8      already quantised: 2 DequantizeLinear, 1 QuantizeLinear" in penstock("inspect", path).out
