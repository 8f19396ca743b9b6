"""Compares the ONNX models of converters with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.zoo.model import ZooModel
from penstock.errors import PenstockError
from penstock.offline.convert.base import ConvertOptions, TensorLink
from penstock.offline.convert.registry import get_converter
from penstock.tensor import Array

OPSET = 21


def run(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of ``model`` in ONNX Runtime, with texts as UTF-8."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    decode = np.frompyfunc(lambda one: one.decode() if isinstance(one, bytes) else one, 1, 1)
    encode = np.frompyfunc(str.encode, 1, 1)
    given = {name: decode(array) if array.dtype == np.object_ else array for name, array in inputs.items()}
    names = [output.name for output in session.get_outputs()]
    found = zip(names, session.run(None, given), strict=True)
    return {name: encode(array) if array.dtype == np.object_ else array for name, array in found}


def with_outputs(model: onnx.ModelProto, links: tuple[TensorLink, ...]) -> onnx.ModelProto:
    """A copy of ``model`` with the tensors of ``links`` as outputs."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    present = {output.name for output in model.graph.output}
    found.graph.output.extend(onnx.ValueInfoProto(name=link.tensor) for link in links if link.tensor not in present)
    return found


def assert_close(found: Array, wanted: Array, name: str) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    if wanted.dtype.kind == "f":
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5, err_msg=name)
    else:
        np.testing.assert_array_equal(found, wanted, err_msg=name)


def assert_same(format: str, source: object, folder: Path, options: ConvertOptions | None = None, **cases: Any) -> None:
    """Convert ``source``, and compare outputs and linked values for the probes of five seeds and ``cases``, by input name."""
    model: Any = get_converter(format).open(source, options or ConvertOptions())
    exported = model.export(folder / "converted.onnx", OPSET)
    found = onnx.load(folder / "converted.onnx")
    onnx.checker.check_model(found, full_check=True)
    assert exported.exporter
    for inputs in [*(one for seed in range(5) for one in model.probes(seed).calls), *([cases] if cases else [])]:
        outputs = run(found, inputs)
        wanted = model.forward(inputs)
        assert list(outputs) == list(wanted) == model.signature.output_names
        for name, array in wanted.items():
            assert_close(outputs[name], array, name)
        values = model.values(inputs, [link.source for link in exported.links])
        linked = run(with_outputs(found, exported.links), inputs)
        for link in exported.links:
            assert_close(linked[link.tensor], values[link.source], link.source)
    model.close()


def assert_zoo(zoo: ZooModel, folder: Path) -> None:
    """The model of the zoo converts, or fails with its diagnosis."""
    source = zoo.make(folder)
    if not zoo.diagnosis:
        assert_same(zoo.format, source, folder, zoo.options)
        return
    with pytest.raises(PenstockError, match=zoo.diagnosis) as raised:
        get_converter(zoo.format).open(source, zoo.options).export(folder / "converted.onnx", OPSET)
    assert raised.value.hint
    assert not (folder / "converted.onnx").exists()
