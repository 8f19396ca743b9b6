"""Keras models that contain code, and those that do not tell their inputs."""

from __future__ import annotations

import importlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tf2onnx")
tf = pytest.importorskip("tensorflow")
import keras  # noqa: E402

from penstock.errors import InvalidArgument, PenstockError, PermissionDenied  # noqa: E402
from penstock.offline.convert.base import ConvertOptions  # noqa: E402
from tensorflow_conversions import CONVERTER, opened  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_lambda_layers_need_trust(folder: Path) -> None:
    with pytest.raises(PermissionDenied, match="Lambda layer 'twice'"):
        opened("keras_lambda", folder)
    model = opened("keras_lambda", folder, trust_pickle=True)
    (got,) = model.forward({"x": np.ones((1, 4), np.float32)}).values()
    assert got.tolist() == [[2.0, 2.0, 2.0, 2.0]]


def test_classes_outside_keras_need_trust(folder: Path, tmp_path: Path) -> None:
    opened("keras_signal", folder)
    hostile = tmp_path / "hostile.keras"
    with zipfile.ZipFile(folder / "keras_signal" / "model.keras") as source, zipfile.ZipFile(hostile, "w") as made:
        for name in source.namelist():
            data = source.read(name)
            if name == "config.json":
                config = json.loads(data)
                config["config"]["layers"][1] |= {"module": "subprocess", "class_name": "Popen"}
                data = json.dumps(config).encode()
            made.writestr(name, data)
    with pytest.raises(PermissionDenied, match="class subprocess.Popen"):
        CONVERTER.open(hostile, ConvertOptions())
    with pytest.raises(PenstockError, match="cannot load|does not have"):
        CONVERTER.open(hostile, ConvertOptions(trust_pickle=True))


def test_a_subclassed_model_needs_its_inputs(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not tell its inputs") as caught:
        CONVERTER.open(importlib.import_module("benchmarks.zoo.tensorflow").subclassed(), ConvertOptions())
    assert '--inputs "features:float32' in caught.value.hint


def test_the_part_of_a_polyglot_that_keras_loads_is_scanned(tmp_path: Path) -> None:
    """HDF5 with an archive appended: the suffix decides which of them Keras loads."""
    harmless = tmp_path / "harmless.h5"
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).save(harmless)
    hostile = tmp_path / "hostile.h5"
    shape = {"output_shape": (3,)}
    hostile_model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x, name="evil", **shape)])
    hostile_model.save(hostile)
    hostile_model.save(tmp_path / "hostile.keras")
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).save(tmp_path / "harmless.keras")
    for suffix, first, second in ((".h5", hostile, "harmless.keras"), (".keras", harmless, "hostile.keras")):
        polyglot = tmp_path / f"polyglot{suffix}"
        polyglot.write_bytes(first.read_bytes() + (tmp_path / second).read_bytes())
        with pytest.raises(PermissionDenied, match="Lambda layer 'evil'"):
            CONVERTER.open(polyglot, ConvertOptions())
