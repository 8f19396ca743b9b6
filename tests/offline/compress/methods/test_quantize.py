from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import models
import networks
import stored_models

DIGITS = ("model.onnx", "--calibrate", "train.npz")
QUICK = ("--method", "mse", "--placement", "linear", "--no-equalize")


def operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


def test_int8_is_smaller_and_as_accurate(penstock, digits: Path) -> None:
    done = penstock(
        "quantize", *DIGITS, *QUICK, "--evaluate", "test.npz", "--budget", "100ms", "-o", "int8.onnx", "--json"
    )
    assert done.code == 0, done.err
    found = done.json
    assert (found["command"], found["precision"], found["placement"]) == ("quantize", "int8", "linear")
    assert found["size_ratio"] > 3
    # One sample of 400 is 0.25 %: INT8 costs this network some of them at most.
    assert found["accuracy_loss"] <= 0.01
    assert found["speedup_interval"]["low"] <= found["speedup"] <= found["speedup_interval"]["high"]
    assert "QLinearConv" in operators(digits / "int8.onnx") or "QuantizeLinear" in operators(digits / "int8.onnx")
    assert "optimised first: 30 → 21 nodes" in done.err
    assert found["steps"][0]["name"] == "optimize"


def test_a_person_reads_a_table_and_sees_the_search(penstock, digits: Path) -> None:
    done = penstock("quantize", *DIGITS, *QUICK, "-o", "int8.onnx", "--chart", "ranges.svg")
    assert done.code == 0, done.err
    assert "size, KiB" in done.out
    assert "x smaller" in done.out
    assert "speed and accuracy are not measured without --evaluate" in done.out
    picture = (digits / "ranges.svg").read_text()
    assert picture.startswith("<svg")
    for name in ("KL divergence", "min-max", "entropy"):
        assert f">{name}<" in picture
    # A picture is replaced, and only a picture.
    tensor = picture.partition("threshold of ")[2].partition('"')[0]
    again = penstock("quantize", *DIGITS, *QUICK, "-o", "int8.onnx", "--chart", "ranges.svg", "--chart-tensor", tensor)
    assert again.code == 0, again.err
    assert (digits / "ranges.svg").read_text() == picture
    unknown = penstock(
        "quantize", *DIGITS, *QUICK, "-o", "int8.onnx", "--chart", "ranges.svg", "--chart-tensor", "none"
    )
    assert (unknown.code, "tensor 'none' has no range to choose" in unknown.err) == (2, True)


def test_a_quantised_model_is_dequantised_and_quantised_again(penstock, digits: Path) -> None:
    assert penstock("quantize", *DIGITS, *QUICK, "-o", "int8.onnx").code == 0
    done = penstock("quantize", "int8.onnx", "--calibrate", "train.npz", *QUICK, "-o", "twice.onnx")
    assert done.code == 0, done.err
    once, twice = (onnx.load(digits / name) for name in ("int8.onnx", "twice.onnx"))
    operators = [sorted(node.op_type for node in model.graph.node) for model in (once, twice)]
    assert operators[0] == operators[1]


def test_rounding_that_cannot_be_undone_is_refused(penstock, digits: Path) -> None:
    """The parameters of the DequantizeLinear are not those of the QuantizeLinear."""
    n = networks.Network()
    scales, zero = [n.weight(np.float32(scale)) for scale in (0.1, 0.2)], n.weight(np.uint8(3))
    rounded = n.op("DequantizeLinear", n.op("QuantizeLinear", "x", scales[0], zero), scales[1], zero)
    n.gemm(rounded, 4, 4, "y")
    (digits / "odd.onnx").write_bytes(n.artifact({"x": ["N", 4]}, {"y": ["N", 4]}).data)
    for options in ([], ["--precision", "int8-weights"]):
        done = penstock("quantize", "odd.onnx", *options, "-o", "twice.onnx")
        assert done.code == 2
        assert "the model is already quantised, and tensor 'dequantizelinear" in done.err
    assert not (digits / "twice.onnx").exists()


def test_a_model_without_weights_is_refused_before_any_work(penstock, folder: Path) -> None:
    (folder / "sum.onnx").write_bytes(models.sum_and_difference().data)
    np.savez(folder / "sum.npz", **{name: np.ones((20, 2), np.float32) for name in "ab"})
    done = penstock("quantize", "sum.onnx", "--calibrate", "sum.npz", "-o", "out.onnx")
    assert (done.code, done.err.splitlines()[0]) == (2, "error: the model has no operator to quantise")


@pytest.mark.slow
def test_mixed_keeps_the_contract_on_data_held_out(penstock, digits: Path) -> None:
    done = penstock(
        "quantize", *DIGITS, "--method", "min-max", "--placement", "wide", "--no-equalize", "--mixed",
        "--max-accuracy-loss", "2%", "--budget", "500ms", "-o", "mixed.onnx", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    step = done.json["steps"][-1]
    assert step["name"] == "mixed_precision"
    assert step["facts"]["accuracy"]["loss"]["value"] <= 0.02
    assert step["options"]["float_groups"] == done.json["float_groups"]
    assert any("groups stay in float" in note for note in done.json["notes"])


def wide_product(folder: Path) -> None:
    (folder / "linear.onnx").write_bytes(models.linear(512, 256).data)
    np.savez(folder / "wide.npz", x=np.random.default_rng(0).standard_normal((40, 512)).astype(np.float32))


@pytest.mark.parametrize(
    ("precision", "ratio"),
    [("int8-dynamic", 3.5), ("int8-weights", 3.4), ("int4-weights", 6.0), ("fp16-weights", 1.9), ("bf16-weights", 1.9)],
)
def test_other_precisions(penstock, folder: Path, precision: str, ratio: float) -> None:
    wide_product(folder)
    data = ("--calibrate", "wide.npz") if precision == "int8-dynamic" else ()
    done = penstock("quantize", "linear.onnx", "--precision", precision, *data, "-o", "out.onnx", "--json")
    assert done.code == 0, done.err
    assert done.json["size_ratio"] > ratio
    # Without a measurement of speed, only of what is for size it is known whether it pays.
    assert done.json["pays"] is (None if precision == "int8-dynamic" else True)


@pytest.mark.parametrize(
    ("precision", "tables", "ratio"),
    [("int8", (), 3.6), ("int8", ("--no-tables",), 1.0), ("int8-weights", (), 3.4), ("int4-weights", (), 5.3)],
)
def test_embedding_tables(penstock, folder: Path, precision: str, tables: tuple[str, ...], ratio: float) -> None:
    (folder / "text.onnx").write_bytes(stored_models.embedding(stored_models.table(2000, 64), outputs=64).data)
    np.savez(folder / "ids.npz", ids=np.random.default_rng(0).integers(0, 2000, (40, 6)))
    data = ("--calibrate", "ids.npz", *QUICK) if precision == "int8" else ()
    done = penstock("quantize", "text.onnx", "--precision", precision, *data, *tables, "-o", "out.onnx", "--json")
    assert done.code == 0, done.err
    assert ratio < done.json["size_ratio"] < (ratio + 1.5 if ratio > 1 else 1.1)


@pytest.mark.parametrize("precision", ["int8-dynamic", "int8-weights"])
def test_recurrent_layers(penstock, folder: Path, precision: str) -> None:
    layer = stored_models.recurrent(inputs=64, hidden=64)
    (folder / "lstm.onnx").write_bytes(layer.data)
    np.savez(folder / "x.npz", **stored_models.recurrent_inputs(layer, 24, 1))
    data = ("--calibrate", "x.npz") if precision == "int8-dynamic" else ()
    done = penstock("quantize", "lstm.onnx", "--precision", precision, *data, "-o", "out.onnx", "--json")
    assert done.code == 0, done.err
    assert done.json["size_ratio"] > 3


def test_a_model_that_gains_nothing_is_written_and_said_to(penstock, folder: Path) -> None:
    done = penstock("quantize", "linear.onnx", "--calibrate", "data.npz", *QUICK, "-o", "out.onnx", "--json")
    assert done.code == 0, done.err
    assert (done.json["pays"], done.json["short_of"]) == (False, ["size"])
    assert any("not smaller than the original" in note for note in done.json["notes"])
    assert (folder / "out.onnx").stat().st_size == done.json["made"]["size_bytes"]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ((), "int8 needs data"),
        (("--precision", "int8-dynamic"), "needs data"),
        (("--precision", "int4-weights", "--block", "33"), "--block must be one of 16, 32, 64, 128, 256, got 33"),
        (("--precision", "fp16-weights", "--block", "32"), "--block requires --precision"),
        (("--precision", "fp16-weights", "--mixed"), "--mixed requires --precision int8"),
        (("--max-accuracy-loss", "1%"), "--max-accuracy-loss requires --mixed"),
        (("--chart-tensor", "x"), "--chart-tensor requires --chart"),
        (("--precision", "int2"), "'int2' is not one of"),
        (("--precision", "int4-weights"), "no MatMul or Gemm with at least"),
        (("--precision", "int4-weights"), "fix: to quantise smaller products"),
    ],
)
def test_options_that_make_no_sense(penstock, folder: Path, options: tuple[str, ...], cause: str) -> None:
    done = penstock("quantize", "linear.onnx", *options, "-o", "out.onnx")
    assert done.code == 2
    assert cause in " ".join(done.err.replace("│", " ").split())
    assert not (folder / "out.onnx").exists()
