from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.zoo.caffe import MODELS, caffemodel
from caffe_networks import compare, image, opened
from converted import differences, export, inputs_of
from penstock.errors import PenstockError
from penstock.offline.convert.base import ConvertOptions, UnsupportedOperators
from penstock.offline.convert.frameworks.caffe import CONVERTER


def test_unsupported_layers_are_listed_together(tmp_path: Path) -> None:
    net = image(1, 2, 8, 8)
    net.add("lstm", "LSTM", "data")
    net.add("pool", "Pooling", "lstm", "pooling_param { pool: STOCHASTIC }")
    net.add("norm", "BatchNorm", "pool", "batch_norm_param { use_global_stats: false }")
    net.weights["x"] = [net.random(1)]
    with pytest.raises(UnsupportedOperators) as caught:
        opened(net, tmp_path)
    found = [(one.op, one.where) for one in caught.value.operators]
    assert found == [
        ("LSTM", "layer 'lstm', line 2"),
        ("Pooling with 'pool: STOCHASTIC'", "layer 'pool' (Pooling, line 3)"),
        ("BatchNorm with 'use_global_stats: false'", "layer 'norm' (BatchNorm, line 4)"),
    ]


def test_a_network_for_training_gives_the_one_for_inference(tmp_path: Path) -> None:
    model = MODELS["trained"]
    source = CONVERTER.open(model.make(tmp_path), model.options)
    assert source.signature.input_names == ["data"]
    assert source.signature.output_names == ["ip"]
    warnings = export(source, tmp_path / "model.onnx").warnings
    assert [warning.split("'")[1] for warning in warnings] == ["accuracy", "loss"]


def test_several_layers_with_one_name(tmp_path: Path) -> None:
    net = image(1, 3)
    net.add("a", "Power", "data", "power_param { shift: 1 }", "x")
    for _ in range(3):
        net.add("relu", "ReLU", "x", "", "x")
    net.add("x/relu", "Sigmoid", "x")
    net.weights["y"] = [net.random(1)]
    source = opened(net, tmp_path)
    exported = export(source, tmp_path / "model.onnx")
    assert not differences(source, exported, tmp_path / "model.onnx", inputs_of(source, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "the network has no layer"),
        ("net: 'train_val.prototxt'\nbase_lr: 0.01\n", "the network has no layer"),
        ("hello world", "line 1: 'world' is not expected here"),
        ('layer { name: "a"\n type: "ReLU"\n', "the network ends within the message of line 1"),
        ('layer { name: "a" type: "ReLU" bottom: "data" top: "a" }', "no earlier layer writes its input 'data'"),
        ('layer { name: 3 type: "ReLU" }', "line 1: 'name' must be a text, got '3'"),
        ("layers { layer { name: 'conv1' type: 'conv' } }", "format V0"),
        ('input: "data" layer { type: "ReLU" bottom: "data" }', "it must have different outputs"),
        ('input: "data" input: "b" input_dim: 1 input_dim: 1 input_dim: 1 input_dim: 1', "2 input"),
        ("layer {" * 100, "nested deeper than 64"),
        ('layer { type: "Convolution" type: [ "a", "b" ] }', "cannot be converted: b"),
    ],
)
def test_broken_networks_are_explained(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(text)
    (tmp_path / "net.caffemodel").write_bytes(caffemodel({"a": [np.ones(1, np.float32)]}))
    with pytest.raises(PenstockError, match=message):
        CONVERTER.open(tmp_path / "net.prototxt", ConvertOptions())


@pytest.mark.parametrize(
    ("rule", "is_in"),
    [
        ("include { phase: TEST }", True),
        ("include { phase: TRAIN }", False),
        ("include { phase: TRAIN } include { phase: TEST }", True),
        ("exclude { phase: TEST }", False),
        ("exclude { phase: TRAIN }", True),
        ('include { stage: "deploy" }', False),
        ('include { not_stage: "deploy" }', True),
        ("include { min_level: 1 }", False),
        ("phase: TRAIN", False),
    ],
)
def test_rules_choose_the_layers_of_the_test_phase(rule: str, is_in: bool, tmp_path: Path) -> None:
    net = image(1, 2)
    net.add("abs", "AbsVal", "data", "", "y")
    net.add("square", "Power", "y", f"power_param {{ power: 2 }} {rule}", "y")
    net.weights["x"] = [net.random(1)]
    assert compare(net, tmp_path, [[-3, 2]])["y"].tolist() == [[9, 4] if is_in else [3, 2]]
