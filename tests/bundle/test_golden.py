"""Bundles of earlier schema versions, packed by the Penstock of their time, still open and answer."""

from __future__ import annotations

import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

import models
import penstock
from penstock.bundle.manifest import MANIFEST, decode
from penstock.bundle.open import is_bundle, open_bundle

GOLDEN = Path(__file__).parent / "golden"
DIGESTS = {
    "schema-1": "1ea057167afbf180966108be984f389b2d4473382bc9d5199ba3e144956ea5ac",
    "schema-2": "ec14930ebe45caf0a04018923d7ad3a885f4ef78af37da24270f2ce7535e166f",
}
"""The digest of each bundle's manifest, by name."""


def weight(name: str) -> np.ndarray:
    """The matrix that the model of the bundle ``name`` multiplies with."""
    if name == "schema-1":
        return models.linear_weight(3, 2)
    return np.random.default_rng(0).choice(np.float32([0, 0, 0, 0.5, -0.25]), (64, 64))


@pytest.mark.parametrize("name", DIGESTS)
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_it_opens_and_answers(name: str, folder: bool, tmp_path: Path) -> None:
    path = GOLDEN / f"{name}.bundle"
    if folder:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(tmp_path / "folder")
        path = tmp_path / "folder"
    assert is_bundle(path)
    assert open_bundle(path).digest == DIGESTS[name]
    matrix = weight(name)
    x = np.random.default_rng(1).standard_normal((5, len(matrix)), np.float32)
    with penstock.open(path) as model:
        assert model.variant is not None
        assert model.variant.name == "fp32"
        np.testing.assert_allclose(model.infer_rows({"x": x})["y"], x @ matrix, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DIGESTS)
def test_what_was_written_is_read(name: str) -> None:
    with zipfile.ZipFile(GOLDEN / f"{name}.bundle") as archive:
        data = archive.read(MANIFEST)
    kept_all(msgspec.json.decode(data), msgspec.json.decode(msgspec.json.encode(decode(data))), "manifest")


def kept_all(written: object, read: object, where: str) -> None:
    """Assert that ``read`` contains everything in ``written``; newer fields may have been added."""
    if isinstance(written, dict):
        assert isinstance(read, dict), where
        for key, value in written.items():
            kept_all(value, read[key], f"{where}.{key}")
    elif isinstance(written, list):
        assert isinstance(read, list), where
        for number, (before, now) in enumerate(zip(written, read, strict=True)):
            kept_all(before, now, f"{where}[{number}]")
    else:
        assert written == read, where
