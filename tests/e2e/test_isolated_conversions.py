"""Conversions with ``--isolated``, whose environments pip really makes: once, in the cache folder of pytest."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.zoo import paddle, tensorflow, tflite
from commands import Command
from penstock.errors import Unavailable
from penstock.offline.convert.registry import FORMATS
from penstock.offline.convert.worker import environments
from served_conversions import assert_served

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

_ROOT = Path(__file__).parents[2]
_ZOOS = {"paddle": paddle.MODELS, "tensorflow": tensorflow.MODELS, "tflite": tflite.MODELS}
_MAKE = """
import importlib, pathlib, sys
print(importlib.import_module("benchmarks.zoo." + sys.argv[1]).MODELS[sys.argv[2]].make(pathlib.Path(sys.argv[3])))
"""

Isolated = Callable[[str], Path]
"""The interpreter of the environment for a format."""


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Isolated:
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytestconfig.cache.mkdir("isolated")))

    def environment(format: str) -> Path:
        try:
            return environments.environment(FORMATS[format])
        except Unavailable as error:
            if "cannot be reached" in error.message:
                pytest.skip(error.message)
            raise

    return environment


def made(python: Path, zoo: str, name: str, folder: Path) -> Path:
    """The model ``name``, made by its framework in the environment of ``python``."""
    path = os.pathsep.join((str(_ROOT), str(_ROOT / "src")))
    done = subprocess.run(
        [python, "-c", _MAKE, zoo, name, folder],
        env=os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("zoo", "name"),
    [
        ("tensorflow", "saved_linear"),
        ("tensorflow", "keras_two_inputs"),
        ("tensorflow", "graph_cnn"),
        ("tflite", "lite_mlp"),
        ("paddle", "mlp"),
        ("paddle", "ocr"),
    ],
)
def test_a_model_of_another_environment_is_converted_and_served(
    penstock: Command, isolated: Isolated, zoo: str, name: str, tmp_path: Path
) -> None:
    model = _ZOOS[zoo][name]
    python = isolated(model.format)
    conversion = assert_served(penstock, model, made(python, zoo, name, tmp_path), tmp_path, python)
    assert conversion.certificate is not None
    assert conversion.certificate.framework.split()[0] in ("paddle", "tensorflow", "tflite", "keras")


def test_all_formats_of_tensorflow_share_one_environment(isolated: Isolated) -> None:
    assert len({isolated(format) for format in ("saved_model", "keras", "graph_def", "tflite")}) == 1


def test_an_older_onnx_does_not_reach_the_caller(isolated: Isolated) -> None:
    code = "import onnx, sys; print(onnx.__version__, 'onnx_ir' in sys.modules)"
    done = subprocess.run([isolated("paddle"), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1.17.0", "False"]
