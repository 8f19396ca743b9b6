from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("paddle2onnx", reason="paddle2onnx is installed only in an isolated environment")

from benchmarks.zoo.paddle import MODELS
from conversions import OPSET, assert_close, run, with_outputs
from penstock.errors import InvalidArgument, InvalidModel, PenstockError
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.frameworks.paddle import CONVERTER

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", [name for name, zoo in MODELS.items() if not zoo.diagnosis])
def test_the_zoo_gives_the_same_answers(name: str, tmp_path: Path) -> None:
    model: Any = CONVERTER.open(MODELS[name].make(tmp_path), ConvertOptions())
    exported = model.export(tmp_path / "converted.onnx", OPSET)
    assert exported.links
    found = with_outputs(onnx.load(tmp_path / "converted.onnx"), exported.links)
    (spec,) = model.signature.inputs
    rng = np.random.default_rng(0)
    for rows in (1, 3):
        shape = [rows if size < 0 else size for size in spec.shape]
        inputs = {spec.name: (rng.normal(size=shape) if spec.datatype.is_float else rng.integers(0, 20, shape))}
        inputs[spec.name] = inputs[spec.name].astype(spec.datatype.dtype)
        outputs = run(found, inputs)
        wanted = model.forward(inputs) | model.values(inputs, [link.source for link in exported.links])
        for tensor, array in wanted.items():
            assert_close(outputs[tensor], array, tensor)
    model.close()


@pytest.mark.parametrize("name", [name for name, zoo in MODELS.items() if zoo.diagnosis])
def test_what_cannot_be_converted_is_diagnosed(name: str, tmp_path: Path) -> None:
    model = CONVERTER.open(MODELS[name].make(tmp_path), ConvertOptions())
    with pytest.raises(PenstockError, match=MODELS[name].diagnosis):
        model.export(tmp_path / "converted.onnx", OPSET)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"must have one program .* found none"):
        CONVERTER.open(tmp_path, ConvertOptions())
    for content in (b"", b"{}", b"\xff" * 64):
        for suffix in (".json", ".pdiparams"):
            (tmp_path / f"model{suffix}").write_bytes(content)
        with pytest.raises(InvalidModel, match=r"'model.json' is not a model of Paddle"):
            CONVERTER.open(tmp_path, ConvertOptions())


def test_other_objects_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="dict is not a path"):
        CONVERTER.open({}, ConvertOptions())
