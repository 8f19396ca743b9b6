"""The Python of the README and of the documentation runs as it is printed, outside the checkout, in the order of each page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trustme
from PIL import Image

from clips import RATE, write_clip
from penstock.artifact import Artifact
from penstock.bundle.pack_model import pack_model
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.offline.split import parts
from processes import ServerProcess

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*/*.md"))) if BLOCK.search(path.read_text())]
GOES_ON_FROM = {"mixed-precision": "sensitivity"}
"""Pages whose code continues the code of another page."""
ASKS_A_SERVER = {"model-repository", "offload", "python-api", "shared-memory"}
"""Pages whose code sends requests to a server of the digits model."""
PACKS_A_PIPELINE = {"pipelines"}
"""Pages whose code runs the pipeline that they declare."""
SPLITS_A_MODEL = {"offload"}
"""Pages whose code uses a model that their command splits."""
CUT = "/pool/GlobalAveragePool_output_0"
OPENS_A_PIPELINE = {"README"}
"""Pages whose code runs a pipeline that is packed elsewhere."""
SCORES_A_CLIP = {"video"}
"""Pages whose code runs a pipeline over a clip of more than a minute."""
SHOP = """\
name: shop
inputs: {image: {media: image}}
models: {classifier: model.onnx}
steps:
  - {step: decode_image, in: image, out: pixels, colour: grey}
  - {step: resize, in: pixels, out: small, size: [8, 8]}
  - {step: normalise, in: small, out: scaled}
  - {step: layout, in: scaled, out: tensor}
  - {model: classifier, in: tensor, out: logits}
  - {step: top_k, in: logits, out: {labels: labels}}
outputs: [labels]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the repository that the pages describe."""
    models = tmp_path_factory.mktemp("models")
    (models / "digits" / "1").mkdir(parents=True)
    shutil.copyfile(DIGITS / "model.onnx", models / "digits" / "1" / "model.onnx")
    arguments = ("--model-repository", str(models), "--model-control-mode", "explicit", "--load-model", "digits")
    with ServerProcess(arguments=(*arguments, "--allow-model-upload")) as started:
        yield started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files that the pages read."""
    for name in ("model.onnx", "calibrate.npz", "evaluate.npz"):
        for place in (tmp_path, tmp_path / "examples" / "digits"):
            place.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(DIGITS / name, place / name)
    pack_model(tmp_path / "model.onnx", tmp_path / "digits.bundle")
    with np.load(tmp_path / "evaluate.npz") as data:
        np.save(tmp_path / "images.npy", data["image"])
        np.save(tmp_path / "labels.npy", data["labels"])
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path


def pack_pipeline_of(page: Path, folder: Path) -> None:
    """Pack the pipeline that ``page`` declares, as its command does, with the files that its code makes first."""
    (declaration,) = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    (folder / "pipeline.yaml").write_text(declaration)
    subprocess.run([sys.executable, "-c", BLOCK.findall(page.read_text())[0]], cwd=folder, check=True)
    pack_pipeline(folder / "pipeline.yaml", folder / "read-digit.bundle")


def pack_shop(folder: Path) -> None:
    """Pack the pipeline of the README, and make the pictures that its code reads."""
    (folder / "pipeline.yaml").write_text(SHOP)
    pack_pipeline(folder / "pipeline.yaml", folder / "shop.bundle")
    for name in ("photo.jpg", "one.jpg", "two.jpg"):
        Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(folder / name)


def pack_score(folder: Path) -> None:
    """Pack a pipeline with a score, and write the clip that the page reads."""
    scored = (
        SHOP.replace("shop", "score")
        .replace("labels: labels", "scores: score")
        .replace("outputs: [labels]", "outputs: [score]")
    )
    (folder / "pipeline.yaml").write_text(scored)
    pack_pipeline(folder / "pipeline.yaml", folder / "score.bundle")
    write_clip(folder / "clip.mp4", 62 * RATE)


def split_a_model(folder: Path) -> None:
    """Split the digits model, under the name that the page gives its model."""
    shutil.copyfile(DIGITS / "model.onnx", folder / "resnet.onnx")
    (folder / "parts").mkdir()
    for name, part in zip(("head", "tail"), parts(Artifact.from_file(folder / "resnet.onnx"), CUT), strict=True):
        (folder / "parts" / f"{name}.onnx").write_bytes(part.data)


def code_of(page: Path) -> str:
    before = GOES_ON_FROM.get(page.stem)
    text = (page.with_stem(before).read_text() if before else "") + page.read_text()
    return "\n".join(BLOCK.findall(text))


def test_the_pages_are_found() -> None:
    assert len(PAGES) >= 20
    assert {"README", "python-api", "errors", "calibrate", "first-bundle"} <= {page.stem for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_imports_nothing_of_the_checkout(page: Path) -> None:
    assert not re.search(r"^\s*(?:from|import) (?:tests|benchmarks|examples)\b", code_of(page), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, folder: Path, request: pytest.FixtureRequest) -> None:
    code = code_of(page)
    if page.stem in PACKS_A_PIPELINE:
        pack_pipeline_of(page, folder)
    if page.stem in OPENS_A_PIPELINE:
        pack_shop(folder)
    if page.stem in SCORES_A_CLIP:
        pack_score(folder)
    if page.stem in SPLITS_A_MODEL:
        split_a_model(folder)
    if page.stem in ASKS_A_SERVER:
        address = "{}:{}".format(*request.getfixturevalue("server").address)
        code = re.sub(r"(?:localhost|127\.0\.0\.1):8000", address, code)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
