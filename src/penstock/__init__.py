"""Penstock turns trained models into bundles and serves them, and bases each decision on measurements.

::

    result = penstock.build("model.onnx", "digits.bundle", calibrate="train.npz", evaluate="test.npz")
    with penstock.open("digits.bundle") as model:
        outputs = model.infer({"image": images})
    with penstock.open("ocr.bundle") as ocr:
        answer = ocr("photo.jpg")
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.artifact import Artifact
    from penstock.bundle.evidence import CandidateRecord
    from penstock.engines.custom_ops import register_op
    from penstock.errors import PenstockError
    from penstock.offline.build import BuildResult, Compression, Recipe, build
    from penstock.offline.compress.functions import compress
    from penstock.offline.compress.outcome import Outcome
    from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
    from penstock.offline.convert.certificate import Certificate
    from penstock.offline.convert.convert import Conversion, convert
    from penstock.offline.judge.contract import Contract
    from penstock.offloading.offloaded import OffloadedModel, OffloadOptions, offload
    from penstock.online.instances.python.typed import Tensor, model
    from penstock.online.instances.python.typed_model import Context
    from penstock.runtime import Model, Pipeline, open

# ONNX Runtime reads this variable on import. Without the variable, ONNX Runtime leaves a telemetry file in the temporary folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "Artifact",
    "BuildResult",
    "CandidateRecord",
    "Certificate",
    "Compression",
    "Context",
    "Contract",
    "Conversion",
    "Model",
    "OffloadOptions",
    "OffloadedModel",
    "Outcome",
    "PenstockError",
    "Pipeline",
    "RangeMethod",
    "Recipe",
    "Tensor",
    "__version__",
    "build",
    "compress",
    "convert",
    "model",
    "offload",
    "open",
    "register_op",
]

# Names are resolved on first use, so that a program that only opens bundles does not import the offline half.
_HOMES = {
    "Artifact": "penstock.artifact",
    "BuildResult": "penstock.offline.build",
    "CandidateRecord": "penstock.bundle.evidence",
    "Certificate": "penstock.offline.convert.certificate",
    "Compression": "penstock.offline.build",
    "Context": "penstock.online.instances.python.typed_model",
    "Contract": "penstock.offline.judge.contract",
    "Conversion": "penstock.offline.convert.convert",
    "Model": "penstock.runtime",
    "OffloadOptions": "penstock.offloading.offloaded",
    "OffloadedModel": "penstock.offloading.offloaded",
    "Outcome": "penstock.offline.compress.outcome",
    "PenstockError": "penstock.errors",
    "Pipeline": "penstock.runtime",
    "RangeMethod": "penstock.offline.compress.ptq.ranges.ranges",
    "Recipe": "penstock.offline.build",
    "Tensor": "penstock.online.instances.python.typed",
    "build": "penstock.offline.build",
    "compress": "penstock.offline.compress.functions",
    "convert": "penstock.offline.convert.convert",
    "model": "penstock.online.instances.python.typed",
    "offload": "penstock.offloading.offloaded",
    "open": "penstock.runtime",
    "register_op": "penstock.engines.custom_ops",
}


if not TYPE_CHECKING:  # otherwise type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'penstock' has no attribute '{name}'")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
