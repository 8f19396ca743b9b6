"""Traces of JAX: values of equations, their lines, and missing operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

pytest.importorskip("jax2onnx")

import jax.numpy as jnp

from benchmarks.zoo.jax import MODELS
from jax_conversions import inputs_of, opened
from penstock.offline.convert.base import UnsupportedOperators
from penstock.offline.convert.frameworks.jax import CONVERTER

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize("name", ["mlp", "attention", "linen_mlp", "nnx_transformer", "scan"])
def test_links_have_the_values_of_the_source(name: str, tmp_path: Path) -> None:
    zoo = MODELS[name]
    source = CONVERTER.open(zoo.make(tmp_path), zoo.options)
    links = source.export(tmp_path / "model.onnx", 21).links
    model = onnx.load(tmp_path / "model.onnx")
    known = {one.name for one in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=one.tensor) for one in links if one.tensor not in known)
    session, inputs = onnxruntime.InferenceSession(model.SerializeToString()), inputs_of(source)
    values = source.values(inputs, [one.source for one in links])
    assert links
    assert values
    assert all(one.where.startswith("jax.py:") for one in links)
    for link in links:
        if link.source in values:
            (got,) = session.run([link.tensor], inputs)
            assert got.shape == values[link.source].shape, link
            np.testing.assert_allclose(got, values[link.source], rtol=1e-4, atol=1e-4, err_msg=str(link))


def test_values_of_unknown_names(tmp_path: Path) -> None:
    source = opened(lambda x: jnp.tanh(x) + 1, x=("N", 4))
    assert source.values(inputs_of(source), ["add 0"]) == {}
    source.export(tmp_path / "model.onnx", 21)
    assert list(source.values(inputs_of(source), ["add 0", "add 7", ""])) == ["add 0"]


def test_all_unsupported_operators(tmp_path: Path) -> None:
    def spectrum(x: Any) -> Any:
        first = jnp.abs(jnp.fft.fft(x))
        return first + jnp.abs(jnp.fft.ifft(x * 2))

    with pytest.raises(UnsupportedOperators) as caught:
        opened(spectrum, x=(4,)).export(tmp_path / "model.onnx", 21)
    assert len({one.where for one in caught.value.operators if one.op == "fft"}) == 2
    assert all(one.where.startswith("test_trace.py:") and one.way_out for one in caught.value.operators)
