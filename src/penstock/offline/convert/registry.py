"""The formats that ``penstock convert`` reads: how each is recognised, and which file under ``frameworks/`` converts it.

A framework is added by one file under ``frameworks/``, one entry here, one extra, one zoo under ``tests/zoo/`` and one page of the docs.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

import msgspec

from penstock.errors import EngineUnavailable
from penstock.offline.convert.base import Converter


class FormatEntry(msgspec.Struct, frozen=True):
    """A format of sources. The framework's package need not be installed."""

    name: str
    """The value of ``--from``."""
    title: str
    framework: str
    """Module under ``frameworks/`` whose ``CONVERTER`` opens the format."""
    package: str
    """Top-level module that must be installed; empty: none."""
    extra: str
    """The extra that installs it."""
    runs_code: bool
    """True if loading the file can run code, so that it needs ``--trust-pickle``."""
    isolated: tuple[str, ...] = ()
    """Requirements of the environment that ``--isolated`` makes."""


_TORCH = ("torch", "torch")
_PADDLE = ("paddlepaddle==3.3.1", "paddle2onnx==2.1.0", "packaging")
"""paddle2onnx requires onnx 1.17, and does not declare that it needs packaging."""
FORMATS = {
    entry.name: entry
    for entry in (
        FormatEntry("onnx", "ONNX", "onnx", "", "", False),
        FormatEntry("exported_program", "torch.export program (.pt2)", "torch", *_TORCH, False),
        FormatEntry("torchscript", "TorchScript (.pt)", "torch", *_TORCH, False),
        FormatEntry("torch", "PyTorch module (module:callable)", "torch", *_TORCH, False),
        FormatEntry("torch_pickle", "pickled PyTorch module (.pt, .pth)", "torch", *_TORCH, True),
        FormatEntry("state_dict", "weights for a PyTorch module (.safetensors, .pt)", "torch", *_TORCH, False),
        FormatEntry("huggingface", "Hugging Face folder", "huggingface", "transformers", "transformers", False),
        FormatEntry("saved_model", "TensorFlow SavedModel", "tensorflow", "tf2onnx", "tf2onnx", False),
        FormatEntry("keras", "Keras (.keras, .h5)", "tensorflow", "tf2onnx", "tf2onnx", False),
        FormatEntry("graph_def", "TensorFlow frozen graph (.pb)", "tensorflow", "tf2onnx", "tf2onnx", False),
        FormatEntry("tflite", "TensorFlow Lite (.tflite)", "tflite", "tf2onnx", "tf2onnx", False),
        FormatEntry("jax", "JAX or Flax (module:callable)", "jax", "jax2onnx", "jax", False),
        FormatEntry("sklearn", "scikit-learn (.skops, .joblib, .pkl)", "sklearn", "skl2onnx", "sklearn", False),
        FormatEntry("xgboost", "XGBoost (.json, .ubj)", "xgboost", "xgboost", "xgboost", False),
        FormatEntry("lightgbm", "LightGBM (.txt)", "lightgbm", "lightgbm", "lightgbm", False),
        FormatEntry("catboost", "CatBoost (.cbm)", "catboost", "catboost", "catboost", False),
        FormatEntry(
            "paddle", "PaddlePaddle folder or .json/.pdmodel", "paddle", "paddle2onnx", "paddle", False, _PADDLE
        ),
        FormatEntry("caffe", "Caffe (.prototxt with .caffemodel)", "caffe", "", "", False),
    )
}


def get_converter(format: str) -> Converter:
    """Import the converter of ``format``. Raises EngineUnavailable if its package is not installed."""
    entry = FORMATS[format]
    if entry.package and find_spec(entry.package) is None:
        raise EngineUnavailable(entry.title, f"penstock[{entry.extra}]", f"package '{entry.package}' is not installed")
    module = importlib.import_module(f"penstock.offline.convert.frameworks.{entry.framework}")
    converter: Converter = module.CONVERTER
    return converter


def detect(path: Path) -> str:
    """The format of the model at ``path``, by its content. Raises NotFound, Unsupported."""
    raise NotImplementedError
