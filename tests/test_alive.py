"""Start here: packs a model into a bundle, opens the bundle and runs inference. It uses no fakes and takes less than two seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import models
from bundles import manifest_for
from penstock.bundle.open import open_bundle
from penstock.bundle.pack import pack
from penstock.engines.registry import get_engine
from penstock.tensor import from_wire, to_wire


def test_from_model_to_answer(tmp_path: Path) -> None:
    # Offline: a trained model is packed with the facts that serving it needs.
    files = {"model.onnx": models.linear(rows=3, columns=2).data}
    pack(manifest_for(files), files, tmp_path / "linear.bundle")

    # Online: the bundle is verified, its first fitting variant loaded into the engine that it names.
    bundle = open_bundle(tmp_path / "linear.bundle")
    variant = bundle.choose(bundle.manifest.machine)
    model = get_engine(variant.engine).load(bundle.artifact(variant), variant.options)

    # A request arrives as bytes, is checked, runs, and leaves as bytes.
    (x_spec,), (y_spec,) = model.signature.inputs, model.signature.outputs
    x = from_wire(np.arange(6, dtype="<f4").tobytes(), x_spec.datatype, (2, 3))
    model.signature.check({x_spec.name: x})
    y = model.forward({x_spec.name: x})[y_spec.name]
    np.testing.assert_allclose(y, x @ models.linear_weight(3, 2), rtol=1e-5)
    assert len(to_wire(y)) == 2 * 2 * 4
