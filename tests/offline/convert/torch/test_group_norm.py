"""Group normalisation of values that are nearly equal."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch_conversions import opened, run, torch, x

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)


@pytest.mark.parametrize("affine", [True, False])
def test_a_blank_image_gives_numbers(affine, tmp_path):
    source = opened(torch.nn.GroupNorm(2, 4, affine=affine), x("N", 4, "H", "W"))
    source.export(tmp_path / "model.onnx", 21)
    generator = np.random.default_rng(0)
    for image, tolerance in ((np.full((1, 4, 64, 64), 7.7), 0.5), (generator.normal(size=(2, 4, 8, 8)), 1e-5)):
        feeds = {"x": image.astype(np.float32)}
        found = run(tmp_path / "model.onnx", feeds)["OUTPUT__0"]
        np.testing.assert_allclose(found, source.forward(feeds)["OUTPUT__0"], atol=tolerance)
