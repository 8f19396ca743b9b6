"""The formats that ``penstock convert`` reads: how each is recognised, and which file under ``frameworks/`` converts it.

A framework is added by one file under ``frameworks/``, one entry here, one extra, one zoo under ``benchmarks/zoo/`` and one docs page.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import msgspec

from penstock.errors import Unavailable
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
    """Requirements of the environment that ``--isolated`` makes. Formats with the same extra and requirements share one."""
    companions: tuple[str, ...] = ()
    """Files of a source folder that belong beside the ONNX model."""
    writes_files: bool = False
    """True if operators of the format can write files when the model runs."""


_TORCH = ("torch", "torch")
_TF2ONNX = (
    "tf2onnx>=1.17",
    "tensorflow-cpu>=2.18; platform_machine == 'x86_64'",
    "tensorflow>=2.18; platform_machine != 'x86_64'",
    "ai-edge-litert>=2.0",
)
_TENSORFLOW = ("tf2onnx", "tf2onnx", False, _TF2ONNX)
_PADDLE = ("paddlepaddle==3.3.1", "paddle2onnx==2.1.0", "packaging")
"""paddle2onnx requires onnx 1.17, and does not declare that it needs packaging."""
_TOKENIZER = (
    *("added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "normalizer.json"),
    *("preprocessor_config.json", "processor_config.json", "sentencepiece.bpe.model", "special_tokens_map.json"),
    *("spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
)
"""Files of tokenizers, of preprocessing and of generation."""
FORMATS = {
    entry.name: entry
    for entry in (
        FormatEntry("onnx", "ONNX", "onnx", "", "", False),
        FormatEntry("exported_program", "torch.export program (.pt2)", "torch", *_TORCH, False, writes_files=True),
        FormatEntry("torchscript", "TorchScript (.pt)", "torch", *_TORCH, False, writes_files=True),
        FormatEntry("torch", "PyTorch module (module:callable)", "torch", *_TORCH, False),
        FormatEntry("torch_pickle", "pickled PyTorch module (.pt, .pth)", "torch", *_TORCH, True),
        FormatEntry("state_dict", "weights for a PyTorch module (.safetensors, .pt)", "torch", *_TORCH, False),
        FormatEntry(
            "huggingface",
            "Hugging Face folder",
            "huggingface",
            "transformers",
            "transformers",
            False,
            companions=_TOKENIZER,
        ),
        FormatEntry("saved_model", "TensorFlow SavedModel", "tensorflow", *_TENSORFLOW, writes_files=True),
        FormatEntry("keras", "Keras (.keras, .h5)", "tensorflow", *_TENSORFLOW),
        FormatEntry("graph_def", "TensorFlow frozen graph (.pb)", "tensorflow", *_TENSORFLOW, writes_files=True),
        FormatEntry("tflite", "TensorFlow Lite (.tflite)", "tflite", *_TENSORFLOW, writes_files=True),
        FormatEntry("jax", "JAX or Flax (module:callable)", "jax", "jax2onnx", "jax", False),
        FormatEntry("sklearn", "scikit-learn (.skops, .joblib, .pkl)", "sklearn", "skl2onnx", "sklearn", False),
        FormatEntry("xgboost", "XGBoost (.json, .ubj)", "xgboost", "xgboost", "xgboost", False),
        FormatEntry("lightgbm", "LightGBM (.txt)", "lightgbm", "lightgbm", "lightgbm", False),
        FormatEntry("catboost", "CatBoost (.cbm)", "catboost", "catboost", "catboost", False),
        FormatEntry(
            "paddle",
            "PaddlePaddle folder or .json/.pdmodel",
            "paddle",
            "paddle2onnx",
            "paddle",
            False,
            _PADDLE,
            writes_files=True,
        ),
        FormatEntry("caffe", "Caffe (.prototxt with .caffemodel)", "caffe", "", "", False),
    )
}


SHAPELESS = frozenset({"torch", "torchscript", "torch_pickle", "state_dict", "jax"})
"""Formats of sources that do not contain the shapes of their inputs."""
WITH_OPS = frozenset(
    name for name, entry in FORMATS.items() if entry.framework in ("torch", "huggingface", "tensorflow", "onnx")
)
"""Formats whose operators ``ConvertOptions.ops`` can define."""


def get_converter(format: str) -> Converter:
    """Import the converter of ``format``. Raises Unavailable if its package is not installed."""
    entry = FORMATS[format]
    if entry.package and find_spec(entry.package) is None:
        raise _unavailable(entry, "which is not installed")
    try:
        module = importlib.import_module(f"penstock.offline.convert.frameworks.{entry.framework}")
    except ImportError as error:
        raise _unavailable(entry, f"which cannot be imported: {error}") from error
    converter: Converter = module.CONVERTER
    return converter


def _unavailable(entry: FormatEntry, reason: str) -> Unavailable:
    apart = ", or add --isolated to install it apart" if entry.isolated else ""
    return Unavailable(
        f"{entry.title} needs the package '{entry.package or entry.framework}', {reason}",
        f"pip install 'penstock[{entry.extra}]'{apart}",
    )
