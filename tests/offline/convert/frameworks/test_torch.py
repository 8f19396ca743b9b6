"""The PyTorch converter: ONNX models give the outputs, and the intermediate values, of the torch models."""

import functools

import numpy as np
import pytest

from benchmarks.zoo.torch import MODELS

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
nn = torch.nn

from torch_conversions import CONVERTER, Affine, feeds_of, opened, run, x  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)

QUICK = (
    "decision",
    "counter",
    "structured",
    "nested",
    "noisy",
    "script_decision",
    "program_counter",
    "scatter",
    "tied",
)
"""Models that are converted in every run; they show one feature each."""
LEFT_OUT = {"noisy": ["OUTPUT__0"]}
"""Outputs that are random."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name, model in MODELS.items()
        if not model.diagnosis
    ],
)
def test_zoo(name, tmp_path):
    model, target = MODELS[name], tmp_path / "model.onnx"
    source = CONVERTER.open(model.make(tmp_path), model.options)
    exported = source.export(target, 21)
    for size in (1, 2, 5) if "image" not in source.signature.input_names else (8, 16):
        feeds = feeds_of(source, size, seed=size)
        if (size, name) == (1, "norms"):
            continue  # torch normalises no instance of one value
        wanted, tensors = source.forward(feeds), tuple(link.tensor for link in exported.links)
        found = run(target, feeds, tensors)
        values = source.values(feeds, [link.source for link in exported.links])
        pairs = [(output, found[output], wanted[output]) for output in wanted if output not in LEFT_OUT.get(name, ())]
        pairs += [
            (link.tensor, found[link.tensor], values[link.source]) for link in exported.links if link.source in values
        ]
        for tensor, got, want in pairs:
            if name != "noisy" or tensor == "OUTPUT__1":
                np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4, err_msg=f"{tensor} for size {size}")
    source.close()


def test_functions_and_functions_that_make_modules(tmp_path):
    for given in (lambda x: x.relu() + 1, Affine, functools.partial(Affine), torch.jit.script(Affine())):
        source = opened(given, x("N", 4))
        source.export(tmp_path / "model.onnx", 21)
        assert source.forward(feeds_of(source, 2, 0))
