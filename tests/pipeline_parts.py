"""What random pipelines are made of, apart from the standard steps: models, functions in Python, a tokenizer, labels."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from onnx import TensorProto
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from models import artifact, fixed_batch, gather, identity, increment, linear, sum_and_difference
from penstock.artifact import Artifact
from penstock.bundle.open import Bundle, open_bundle
from penstock.bundle.pack_model import pack_model
from penstock.bundle.pipeline import facts_of, load_models, local_models
from penstock.pipeline.function import ModelTraits
from penstock.pipeline.streaming.models import LocalModel
from penstock.tensor import DataType

_FP32, _INT64, _TEXT = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING

PYTHON = """\
from __future__ import annotations

import numpy as np


def count(values: list[str]) -> Tensor["INT64"]:
    return np.array(len(values))


def joined(values: list[str]) -> str:
    return " ".join(values)[:1000]


def words(text: str) -> list[str]:
    return text.split()[:300]


def repeat(number: Tensor["INT64"]) -> list[str]:
    return [f"{n} \\u2713" for n in range(int(number) % 301)]


def rows(x: Tensor["FP32", -1]) -> list[Tensor["FP32", 3]]:
    return [np.full(3, one, np.float32) for one in x[:300]]


def squares(x: Tensor["FP32", -1]) -> list[Tensor["FP32", -1, -1]]:
    return [np.full((n % 5, n % 3), n, np.float32) for n in range(len(x) % 50)]


def both(x: Tensor["FP32", -1]) -> tuple[str, Tensor["FP32"], Tensor["INT64", -1]]:
    return f"{len(x)} numbers", np.float32(len(x)), np.arange(len(x))


def upper(text: str) -> str:
    if "!" in text:
        raise ValueError("no shouting")
    return text.upper()


def half(text: str) -> str:
    return "\\ud83d" if text.startswith("water") else text


def size(data: bytes) -> Tensor["INT64"]:
    return len(data)


def two(x: Tensor["FP32", -1]) -> Tensor["FP32", 2]:
    return x


def encoded(text: str) -> Tensor["BYTES", -1]:
    return np.array([one.encode() for one in text[:20]], object)


def gr\u00f6\u00dfe(text: str) -> Tensor["INT64"]:
    return len(text)


def half_size(x: Tensor["FP32", -1]) -> Tensor["FP32", -1]:
    return x[::2]
""".encode()
PYTHON_FUNCTIONS = (
    *("count", "joined", "words", "repeat", "rows", "squares", "both", "upper", "half", "size", "two", "encoded"),
    *("half_size", "größe"),
)
LABEL_LISTS = {"pair": ("no", "yes"), "ten": tuple(map(str, range(10))), "file": ("zero", "one ✓", "two")}


def _tokenizer() -> bytes:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "water", "the", "pump", "##s", "a", "!"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(words[:4])
    return tokenizer.to_str().encode()


TOKENIZER = _tokenizer()
FILES = {
    "labels.txt": "\n".join(LABEL_LISTS["file"]).encode(),
    "tokenizer.json": TOKENIZER,
    "own/steps.py": PYTHON,
}
"""The files beside a declaration, apart from the models."""


def _artifacts() -> dict[str, Artifact]:
    texts = (_TEXT, ["N"])
    return {
        "linear": linear(),
        "names": identity(DataType.BYTES),
        "text": artifact([("Identity", ["x"], ["y"])], [("x", *texts)], [("y", *texts)]),
        "int8": increment(DataType.INT8),
        "pixels": artifact(
            [("GlobalMaxPool", ["x"], ["y"])], [("x", _FP32, ["N", 3, "H", "W"])], [("y", _FP32, ["N", 3, 1, 1])]
        ),
        "mixed": artifact(
            [("ReduceMax", ["x"], ["most"]), ("Sub", ["x", "most"], ["y"])],
            [("x", _FP32, ["N", "K"])],
            [("y", _FP32, ["N", "K"])],
        ),
        "fixed": fixed_batch(),
        "whole": artifact([("Neg", ["x"], ["y"])], [("x", _FP32, [2, 3])], [("y", _FP32, [2, 3])]),
        "gather": gather(),
        "pair": sum_and_difference(),
        "free": artifact([("Abs", ["x"], ["y"])], [("x", _FP32, ["N", "K"])], [("y", _FP32, ["N", "K"])]),
        "tokens": artifact(
            [("Add", ["x", "one"], ["y"])],
            [("x", _INT64, ["N", "T"])],
            [("y", _INT64, ["N", "T"])],
            {"one": np.array([1])},
        ),
    }


class Models(NamedTuple):
    """The models of random pipelines, as files and in memory."""

    files: Mapping[str, bytes]
    """The bundles."""
    traits: Mapping[str, ModelTraits]
    loaded: Mapping[str, LocalModel]


@functools.cache
def catalogue() -> Models:
    """All models. They stay in memory."""
    files, bundles = dict[str, bytes](), dict[str, Bundle]()
    with tempfile.TemporaryDirectory() as folder:
        for name, one in _artifacts().items():
            source, target = Path(folder, f"{name}.onnx"), Path(folder, f"{name}.bundle")
            source.write_bytes(one.data)
            pack_model(source, target, name=name)
            files[name] = target.read_bytes()
            bundles[name] = open_bundle(target)
        loaded = load_models(bundles)
    return Models(files, {name: facts_of(one) for name, one in bundles.items()}, local_models(bundles, loaded))
