from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks.zoo.onnx import MODELS, attributes_7, faulty, model, modern, upsample_7, upsample_9, value
from converted import differences, export, inputs_of
from penstock.errors import InvalidArgument, InvalidModel, NotFound, PenstockError, Unsupported
from penstock.offline.convert.base import Axis, ConvertOptions, InputSpec, UnsupportedOperators
from penstock.offline.convert.frameworks.onnx import CONVERTER
from penstock.offline.convert.repairs.graphs import opset_of
from penstock.offline.optimize import mapped

WORKING = [name for name, one in MODELS.items() if not one.diagnosis]
PLAIN = ConvertOptions()


@pytest.mark.parametrize("name", WORKING)
def test_every_tensor_of_the_zoo_stays_the_same(name: str, tmp_path: Path) -> None:
    source = CONVERTER.open(MODELS[name].make(tmp_path), MODELS[name].options)
    path = tmp_path / "new" / "model.onnx"
    exported = export(source, path)
    assert opset_of(onnx.load(path)) == 21
    assert exported.links
    for batch, sign in ((1, 1), (3, -1)):  # both branches of If
        inputs = {name: sign * np.abs(array) for name, array in inputs_of(source, batch, batch).items()}
        assert not differences(source, exported, path, inputs)
    source.close()
    source.close()


def test_custom_operators_are_listed_together(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperators) as caught:
        CONVERTER.open(MODELS["custom_operators"].make(tmp_path), PLAIN)
    assert [(one.op, one.where) for one in caught.value.operators] == [
        ("mmdeploy::Deform", "node 'deform'"),
        ("org.pytorch.aten::ATen", "node 'aten'"),
    ]


def test_a_model_that_needs_nothing_is_not_changed(tmp_path: Path) -> None:
    proto = modern()
    source = CONVERTER.open(proto, PLAIN)
    exported = export(source, tmp_path / "model.onnx")
    assert exported.exporter.startswith("unchanged")
    assert onnx.load(tmp_path / "model.onnx") == proto


def test_an_opset_is_never_lowered(tmp_path: Path) -> None:
    exported = export(CONVERTER.open(modern(), PLAIN), tmp_path / "model.onnx", 17)
    assert "never converted to an older one" in exported.warnings[0]
    assert opset_of(onnx.load(tmp_path / "model.onnx")) == 21


def test_repairs_are_reported(tmp_path: Path) -> None:
    exported = export(CONVERTER.open(faulty().SerializeToString(), PLAIN), tmp_path / "model.onnx")
    assert len(exported.warnings) == 6


def test_random_operators_are_found(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["r"], "noise", scale=0.1),
        helper.make_node("Add", ["x", "r"], ["y"]),
    ]
    exported = export(CONVERTER.open(model(nodes, 13), PLAIN), tmp_path / "model.onnx")
    assert exported.random == ("RandomNormalLike 'noise'",)


def test_free_axes_have_their_names() -> None:
    source = CONVERTER.open(
        model([helper.make_node("Relu", ["x"], ["y"])], 13, shape=("batch", 3, "height", "height")), PLAIN
    )
    assert source.axes == {"x": (Axis(0, "batch"), Axis(2, "height"), Axis(3, "height"))}


def test_the_user_frees_and_fixes_dimensions(tmp_path: Path) -> None:
    options = ConvertOptions(inputs=(InputSpec("x", None, (4, 3, 6, 8)),), dynamic={"x": {3: "width"}})
    source = CONVERTER.open(upsample_9(), options)
    assert source.signature.inputs[0].shape == (4, 3, 6, -1)
    exported = export(source, tmp_path / "model.onnx")
    array = np.random.default_rng(0).normal(size=(4, 3, 6, 11)).astype(np.float32)
    assert not differences(source, exported, tmp_path / "model.onnx", {"x": array})


def test_outputs_can_be_chosen(tmp_path: Path) -> None:
    source = CONVERTER.open(upsample_7(), ConvertOptions(outputs=("a",)))
    exported = export(source, tmp_path / "model.onnx")
    assert source.signature.output_names == ["a"]
    assert not differences(source, exported, tmp_path / "model.onnx", inputs_of(source, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ConvertOptions(outputs=("z",)), "the model has no output 'z'"),
        (ConvertOptions(dynamic={"z": {0: "n"}}), "the model has no input 'z'"),
        (ConvertOptions(dynamic={"x": {9: "n"}}), "input 'x' has 4 dimensions"),
        (ConvertOptions(inputs=(InputSpec("x", None, (1, 1, 1, 1, 1)),)), "input 'x' has 4 dimensions"),
        (ConvertOptions(inputs=(InputSpec("x", None, (1, 3, 6)),)), "input 'x' has 4 dimensions"),
    ],
)
def test_wrong_options_are_explained(options: ConvertOptions, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        CONVERTER.open(upsample_7(), options)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"not a model", "not an ONNX model"),
        (b"PK\x03\x04", "not an ONNX model|graph"),
        (upsample_7().SerializeToString()[:-30], "not an ONNX model"),
    ],
)
def test_files_that_are_no_model(data: bytes, message: str, tmp_path: Path) -> None:
    for name in ("model.onnx", "model.bin"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidModel, match=message):
            CONVERTER.open(tmp_path / name, PLAIN)
    with pytest.raises(NotFound):
        CONVERTER.open(tmp_path / "absent.bin", PLAIN)
    with pytest.raises(InvalidModel, match="cannot be read|cannot read"):
        CONVERTER.open(tmp_path, PLAIN)


def test_an_opset_before_7() -> None:
    with pytest.raises(Unsupported, match="opset 6, but the oldest that runs is 7"):
        CONVERTER.open(model([helper.make_node("Relu", ["x"], ["y"])], 6), PLAIN)


def test_external_data_stays_in_its_folder(tmp_path: Path) -> None:
    proto = upsample_7()
    path = tmp_path / "in" / "model.onnx"
    path.parent.mkdir()
    onnx.save_model(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (path.parent / "w.bin").rename(tmp_path / "w.bin")
    with pytest.raises(InvalidModel, match="missing"):
        CONVERTER.open(path, PLAIN)
    moved = onnx.load(path, load_external_data=False)
    for tensor in moved.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../w.bin" if entry.key == "location" else entry.value
    path.write_bytes(moved.SerializeToString())
    with pytest.raises(InvalidModel, match="outside"):
        CONVERTER.open(path, PLAIN)


def test_every_damaged_byte_gives_a_model_or_an_error(tmp_path: Path) -> None:
    data = attributes_7().SerializeToString()
    for place in range(0, len(data), 5):
        damaged = data[:place] + bytes([data[place] ^ (1, 0x80, 0xFF)[place % 3]]) + data[place + 1 :]
        try:
            CONVERTER.open(damaged, PLAIN).export(tmp_path / "model.onnx", 21)
        except PenstockError as error:
            assert error.message.isprintable() or "\ufffd" in error.message  # noqa: PT017


def test_sequences_are_left_out_of_the_values(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["s"], axis=1),
        helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=1),
    ]
    source = CONVERTER.open(model(nodes, 13), PLAIN)
    export(source, tmp_path / "model.onnx")
    array = np.zeros((1, 3, 6, 8), np.float32)
    assert set(source.values({"x": array}, ["s", "y"])) == {"y"}


def test_weights_that_are_inputs_too(tmp_path: Path) -> None:
    """Until IR version 3, every weight had to be an input."""
    proto = upsample_7()
    proto.ir_version = 3
    proto.graph.input.append(value("w", (4, 3, 3, 3), TensorProto.FLOAT))
    source = CONVERTER.open(proto, PLAIN)
    exported = export(source, tmp_path / "model.onnx")
    assert source.signature.input_names == ["x"]
    assert not differences(source, exported, tmp_path / "model.onnx", inputs_of(source, 2))


def test_a_model_above_the_limit_keeps_its_weights_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of 2 GiB is lowered, so that the model is small."""
    monkeypatch.setattr(mapped, "LIMIT_BYTES", 16 << 10)
    monkeypatch.setattr(mapped, "LEAST_BYTES", 512)
    nodes = [
        helper.make_node("Upsample", ["x", "s"], ["a"], "up", mode="linear"),
        helper.make_node("Softmax", ["a"], ["b"], axis=1),
        helper.make_node("Conv", ["b", "w"], ["y"], "conv"),
    ]
    weights = {
        "s": np.array([1, 1, 2, 2], np.float32),
        "w": np.random.default_rng(0).normal(size=(64, 3, 5, 5)).astype(np.float32),
    }
    path = tmp_path / "large.onnx"
    onnx.save_model(
        model(nodes, 9, weights=weights), path, save_as_external_data=True, location="w.bin", size_threshold=512
    )
    source = CONVERTER.open(path, PLAIN)
    exported = export(source, tmp_path / "model.onnx")
    assert "w" not in [value.name for value in onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.input]
    assert (tmp_path / "model.onnx.data").stat().st_size >= 64 * 3 * 5 * 5 * 4
    assert not differences(source, exported, tmp_path / "model.onnx", inputs_of(source, 2))


def test_a_model_without_standard_operators(tmp_path: Path) -> None:
    proto = model([helper.make_node("Normalizer", ["x"], ["y"], domain="ai.onnx.ml", norm="L1")], 9, shape=("N", 3))
    del proto.opset_import[:]
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    source = CONVERTER.open(proto, PLAIN)
    exported = export(source, tmp_path / "model.onnx")
    assert not differences(source, exported, tmp_path / "model.onnx", inputs_of(source, 2))
