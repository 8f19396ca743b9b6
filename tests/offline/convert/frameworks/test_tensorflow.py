"""SavedModels, Keras models and frozen graphs: ONNX Runtime gives the outputs of TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("tf2onnx")
tf = pytest.importorskip("tensorflow")

from benchmarks.zoo.tensorflow import MODELS  # noqa: E402
from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, PenstockError, Unsupported  # noqa: E402
from penstock.offline.convert.base import ConvertOptions, FrameworkModel  # noqa: E402
from tensorflow_conversions import CONVERTER, inputs_for, opened, run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if not model.diagnosis])
def test_the_outputs_and_linked_values_are_those_of_tensorflow(name: str, folder: Path) -> None:
    model = opened(name, folder)
    target = folder / f"{name}.onnx"
    exported = model.export(target, 21)
    written = onnx.load(target)
    onnx.checker.check_model(written, full_check=True)
    assert next(one.version for one in written.opset_import if not one.domain) == 21
    assert [one.name for one in written.graph.input] == model.signature.input_names
    assert [one.name for one in written.graph.output] == model.signature.output_names
    random = {"noisy"} if exported.random else set()
    for rows, size in ((1, 9), (4, 6)):
        inputs = inputs_for(model.signature, rows, size)
        want, got = model.forward(inputs), run(target, inputs)
        assert want.keys() == got.keys()
        for output in want.keys() - random:
            np.testing.assert_allclose(got[output], want[output], rtol=1e-4, atol=1e-5)
    if exported.links and not random:
        _check_links(model, written, exported.links, inputs)


def _check_links(model: FrameworkModel, written: onnx.ModelProto, links: Any, inputs: Mapping[str, np.ndarray]) -> None:
    del written.graph.output[:]
    written.graph.output.extend(onnx.ValueInfoProto(name=link.tensor) for link in links)
    ours, theirs = run(written.SerializeToString(), inputs), model.values(inputs, [link.source for link in links])
    assert len(theirs) == len({link.source for link in links})
    for link in links:
        np.testing.assert_allclose(ours[link.tensor], theirs[link.source], rtol=1e-3, atol=1e-4, err_msg=link.tensor)


def test_a_broken_file_of_operators_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "my_ops.py").write_text("1 / 0\n")
    with pytest.raises(InvalidArgument, match=r"'my_ops.py' raised ZeroDivisionError"):
        opened("saved_linear", folder, ops=tmp_path / "my_ops.py")


def test_random_operators_are_named(folder: Path) -> None:
    exported = opened("saved_random", folder).export(folder / "random.onnx", 21)
    assert exported.random == ("RandomStandardNormal at random_normal/RandomStandardNormal",)


def test_outputs_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    model = opened("keras_two_inputs", folder, outputs=("score",))
    model.export(tmp_path / "model.onnx", 21)
    assert [one.name for one in onnx.load(tmp_path / "model.onnx").graph.output] == ["score"]


def test_inputs_that_the_model_rejects_are_reported_as_such(folder: Path) -> None:
    model = opened("keras_two_inputs", folder)
    with pytest.raises(InvalidInput):
        model.forward({"ids": np.zeros((2, 6), np.int32), "price": np.zeros((3, 1), np.float32)})


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x89HDF\r\n\x1a\n", b"PK\x03\x04", b"\x08\x01\x12\xff\xff\xff\xff\x0f"]
)
@pytest.mark.parametrize("suffix", [".pb", ".keras", ".h5"])
def test_broken_files_are_rejected(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    with pytest.raises((InvalidModel, Unsupported)):
        CONVERTER.open(path, ConvertOptions())


@pytest.mark.parametrize("name", ["keras_cnn", "keras_h5", "saved_linear", "graph_cond"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.98])
def test_truncated_models_are_rejected(name: str, share: float, folder: Path, tmp_path: Path) -> None:
    (folder / name).mkdir(exist_ok=True)
    path = Path(str(MODELS[name].make(folder / name)))
    cut = path / "saved_model.pb" if path.is_dir() else path
    data = cut.read_bytes()
    try:
        cut.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(PenstockError):
            CONVERTER.open(path, ConvertOptions())
    finally:
        cut.write_bytes(data)
