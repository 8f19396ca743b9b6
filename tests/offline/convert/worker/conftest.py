"""A source that a fake converter runs in another process."""

import contextlib
from pathlib import Path

import pytest

import fake_worker
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.worker.process import Limits
from penstock.offline.convert.worker.remote import open_remote

NO_OPTIONS = ConvertOptions()


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """The process finds the fake converter, and its folders are where a test can count them."""
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_worker.__file__).parent))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def opened(tmp_path):
    """Opens a source that runs ``code`` in each call."""
    with contextlib.ExitStack() as sources:

        def start(code="", options=NO_OPTIONS, **limits):
            path = tmp_path / "source"
            path.write_text(code)
            return sources.enter_context(
                open_remote("fake", path, options, limits=Limits(**limits), program="fake_worker")
            )

        yield start
