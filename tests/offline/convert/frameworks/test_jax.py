"""JAX functions and Flax modules: the whole zoo, links and values, names, and declarations that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

pytest.importorskip("jax2onnx")

import jax
import jax.numpy as jnp

from benchmarks.zoo.jax import MODELS
from jax_conversions import SIZES, inputs_of, opened
from penstock.errors import InvalidArgument, InvalidInput, PenstockError, Unsupported
from penstock.offline.convert.base import ConvertOptions, Exported, InputSpec
from penstock.offline.convert.frameworks.jax import CONVERTER, JaxModel
from penstock.tensor import DataType

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def check_same(source: JaxModel, folder: Path, sizes: dict[str, int] = SIZES) -> Exported:
    exported = source.export(folder / "model.onnx", 21)
    onnx.checker.check_model(folder / "model.onnx", full_check=True)
    session, inputs = onnxruntime.InferenceSession(folder / "model.onnx"), inputs_of(source, sizes)
    expected, names = source.forward(inputs), [one.name for one in session.get_outputs()]
    assert [one.name for one in session.get_inputs()] == source.signature.input_names
    assert names == source.signature.output_names == list(expected)
    for spec, got in zip(source.signature.outputs, session.run(None, inputs), strict=True):
        assert spec.admits(got.shape)
        assert (got.shape, got.dtype) == (expected[spec.name].shape, spec.datatype.dtype)
        np.testing.assert_allclose(got, expected[spec.name], rtol=1e-4, atol=1e-5)
    return exported


@pytest.mark.parametrize("name", [name for name, zoo in MODELS.items() if not zoo.diagnosis])
def test_zoo(name: str, tmp_path: Path) -> None:
    zoo = MODELS[name]
    source = CONVERTER.open(zoo.make(tmp_path), zoo.options)
    check_same(source, tmp_path)
    check_same(source, tmp_path, {"N": 1, "T": 3})
    source.close()


@pytest.mark.parametrize("name", [name for name, zoo in MODELS.items() if zoo.diagnosis])
def test_diagnosis(name: str, tmp_path: Path) -> None:
    zoo = MODELS[name]
    with pytest.raises(Unsupported) as caught:
        CONVERTER.open(zoo.make(tmp_path), zoo.options).export(tmp_path / "model.onnx", 21)
    assert zoo.diagnosis in caught.value.message
    assert caught.value.hint
    assert not (tmp_path / "model.onnx").exists()


def test_names_of_outputs(tmp_path: Path) -> None:
    """Inputs, constants and repeated values are outputs too."""
    source = opened(lambda x: {"a": x, "b": (x * 2, x), "c": jnp.ones(3)}, x=("N", 4))
    assert source.signature.output_names == ["a", "b__0", "b__1", "c"]
    check_same(source, tmp_path)
    assert opened(jnp.tanh, x=(3,)).signature.output_names == ["OUTPUT__0"]
    assert opened(lambda x: (x, [x]), x=(3,)).signature.output_names == ["OUTPUT__0", "OUTPUT__1__0"]


def test_chosen_outputs(tmp_path: Path) -> None:
    options = ConvertOptions(inputs=(InputSpec("x", None, ("N", 4)),), outputs=("b",))
    source = CONVERTER.open(lambda x: {"a": x + 1, "b": x + 2}, options)
    assert source.signature.output_names == ["b"]
    check_same(source, tmp_path)
    with pytest.raises(InvalidArgument, match="has no output 'z'"):
        CONVERTER.open(lambda x: x, ConvertOptions(inputs=options.inputs, outputs=("z",)))


def test_sample_and_dynamic(tmp_path: Path) -> None:
    sample = {"x": np.ones((2, 4), np.float32), "y": np.zeros((4,), np.float32)}
    source = CONVERTER.open(lambda x, y: x * y, ConvertOptions(sample=sample, dynamic={"x": {0: "N"}}))
    assert [one.shape for one in source.signature.inputs] == [(-1, 4), (4,)]
    check_same(source, tmp_path)


def test_double_precision(tmp_path: Path) -> None:
    spec = InputSpec("x", DataType.FP64, ("N", 4))
    source = CONVERTER.open(lambda x: jnp.exp(x) / 3, ConvertOptions(inputs=(spec,)))
    assert source.signature.outputs[0].datatype is DataType.FP64
    check_same(source, tmp_path)
    assert not jax.config.jax_enable_x64


def test_sample_with_64_bits() -> None:
    """JAX would take these numbers with 32 bits."""
    for dtype in (np.float64, np.int64):
        with pytest.raises(InvalidArgument, match="32 bits"):
            CONVERTER.open(lambda x: x, ConvertOptions(sample={"x": np.ones((2, 4), dtype)}))


def test_inputs_by_position(tmp_path: Path) -> None:
    source = opened(lambda *arrays: arrays[0] - arrays[1], a=("N", 4), b=(4,))
    assert source.signature.input_names == ["a", "b"]
    check_same(source, tmp_path)


@pytest.mark.parametrize("name", ["batch size", "2*n", "n+1", "ü", "N"])
def test_names_of_dimensions(name: str, tmp_path: Path) -> None:
    check_same(opened(lambda x: x * 2, x=(name, 4)), tmp_path, {name: 5})


def test_jitted_function(tmp_path: Path) -> None:
    check_same(opened(jax.jit(lambda x: x * 2), x=("N", 4)), tmp_path)


def test_module_of_nnx_keeps_its_mode(tmp_path: Path) -> None:
    module = MODELS["nnx_cnn"].make(tmp_path)
    CONVERTER.open(module, MODELS["nnx_cnn"].options)
    assert module.dropout.deterministic is False  # type: ignore[attr-defined]


def test_random_operators_are_named(tmp_path: Path) -> None:
    source = opened(lambda x: x + jax.random.normal(jax.random.PRNGKey(0), (4,)), x=("N", 4))
    assert "RandomNormal" in source.export(tmp_path / "model.onnx", 21).random[0]


def test_size_that_must_be_known(tmp_path: Path) -> None:
    source = opened(lambda x: x.reshape(int(x.shape[0]), 2, 2), x=("N", 4))
    with pytest.raises(Unsupported) as caught:
        source.export(tmp_path / "model.onnx", 21)
    assert "--inputs" in caught.value.hint


def _raises(x: Any) -> Any:
    raise SystemError("no luck")


@pytest.mark.parametrize(
    ("function", "inputs", "told"),
    [
        (lambda x: x, (), "no inputs are declared"),
        (lambda x, y: x + y, (InputSpec("x", None, (2,)),), "the function takes ['x', 'y']"),
        (lambda x: x, (InputSpec("x", None, (2,)), InputSpec("z", None, (2,))), "the function takes ['x']"),
        (
            lambda x, y=1, z=2: x + z,
            (InputSpec("x", None, (2,)), InputSpec("z", None, (2,))),
            "the function takes ['x', 'y']",
        ),
        (lambda x: x, (InputSpec("x", None, (2,)), InputSpec("y", None, (2,))), "the function takes ['x']"),
        (lambda x: x, (InputSpec("x", None, None),), "needs a shape"),
        (lambda x: x, (InputSpec("x", DataType.BYTES, (2,)),), "needs a shape"),
        (lambda x: x, (InputSpec("x", DataType.INT64, (2,)),), "32 bits"),
        (lambda x: x @ jnp.ones((3, 3)), (InputSpec("x", None, ("N", 4)),), "rejects the inputs"),
        (_raises, (InputSpec("x", None, (2,)),), "no luck"),
        (7, (InputSpec("x", None, (2,)),), "is not a function"),
        (lambda x: "text", (InputSpec("x", None, (2,)),), ""),
    ],
)
def test_wrong_declarations(function: Any, inputs: tuple[InputSpec, ...], told: str) -> None:
    with pytest.raises(PenstockError) as caught:
        CONVERTER.open(function, ConvertOptions(inputs=inputs))
    assert told in str(caught.value)
    assert caught.value.hint


def test_rejected_inputs() -> None:
    source = opened(lambda x: x @ jnp.ones((4, 3)), x=("N", 4))
    with pytest.raises(InvalidInput):
        source.forward({"x": np.ones((2, 5), np.float32)})
