"""Small pipelines in folders, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

import models
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.pipeline.check import checked
from penstock.pipeline.declaration import Declaration, parse
from penstock.pipeline.function import Function, ModelTraits
from penstock.pipeline.source import SourceText, read_source
from penstock.pipeline.steps.base import StepResources
from penstock.pipeline.streaming.models import LocalModel
from penstock.tensor import DataType, Signature, TensorSpec

SCORES = """\
name: scores
inputs:
  features: {media: tensor, shape: [3]}
models:
  linear: linear.onnx
labels: {pair: [no, yes]}
steps:
  - {model: linear, in: features, out: logits}
  - {step: softmax, in: logits, out: p}
  - step: top_k
    in: p
    out: {labels: label, scores: score}
    labels: pair
    k: 1
outputs: [label, p]
examples:
  - {features: [1, 2, 3]}
  - {features: [0, -1, 0.5]}
"""
TEXT_AND_FEATURES = """\
name: both
inputs:
  text: {media: text}
  features: {media: tensor, shape: [-1]}
steps:
  - {step: softmax, in: features, out: p}
outputs: [p, text]
"""
FEATURES = np.array([1, 2, 3], np.float32)
LINEAR = Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), (TensorSpec("y", DataType.FP32, (-1, 2)),))
FACTS = {"linear": ModelTraits(LINEAR, max_batch=8)}
WEIGHT = models.linear_weight(3, 2)
LOCAL = {"linear": LocalModel(lambda inputs: {"y": inputs["x"] @ WEIGHT}, max_batch=8)}


def declared(text: str, **changes: Any) -> Declaration:
    """The declaration ``text``, with ``changes`` to its keys."""
    if not changes:
        return parse(read_source(text.encode(), "pipeline.yaml"))
    data = read_source(text.encode(), "pipeline.yaml").data | changes
    return parse(SourceText("pipeline.yaml", {key: value for key, value in data.items() if value is not None}, {}))


def function(
    text: str = SCORES, allow_python: bool = False, files: Mapping[str, bytes] = MappingProxyType({}), **changes: Any
) -> Function:
    """The checked pipeline ``text``, with ``changes`` to its keys."""
    declaration = declared(text, **changes)
    labels = {name: given for name, given in declaration.labels.items() if isinstance(given, tuple)}
    return checked(declaration, FACTS, StepResources(labels, files), allow_python)


def scores_folder(folder: Path, text: str = SCORES) -> Path:
    """The declaration ``text`` in ``folder``, beside its model."""
    (folder / "linear.onnx").write_bytes(models.linear(3, 2).data)
    (folder / "pipeline.yaml").write_text(text)
    return folder / "pipeline.yaml"


def scores_bundle(folder: Path, text: str = SCORES, **options: Any) -> Path:
    """The bundle of ``text``."""
    pack_pipeline(scores_folder(folder, text), folder / "scores.bundle", **options)
    return folder / "scores.bundle"


def canonical(declaration: Declaration) -> bytes:
    """The form of ``declaration`` in a bundle."""
    return msgspec.json.encode(declaration.to_data())
