"""Compares an exported model with its source, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.offline.convert.base import Exported, FrameworkModel
from penstock.offline.sessions import loaded
from penstock.tensor import Array

TOLERANCE = 1e-5


def export(source: FrameworkModel, path: Path, opset: int = 21) -> Exported:
    """Export ``source``, and check the file and its declared types and shapes."""
    exported = source.export(path, opset)
    onnx.checker.check_model(str(path), full_check=True)
    return exported


def differences(
    source: FrameworkModel, exported: Exported, path: Path, inputs: Mapping[str, Array]
) -> dict[str, tuple[float, str]]:
    """The relative difference of each linked tensor and each output that differs, with its place."""
    proto = onnx.load(path)
    outputs = [value.name for value in proto.graph.output]
    links = {link.tensor: link for link in exported.links}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in links if name not in outputs)
    with loaded(Artifact.from_bytes(proto.SerializeToString()), as_written=True) as model:
        found = model.forward(inputs)
    expected = source.values(inputs, [link.source for link in links.values()])
    pairs = {name: (expected[link.source], found[name], link.where) for name, link in links.items()}
    pairs |= {name: (value, found[name], "output") for name, value in source.forward(inputs).items()}
    wrong: dict[str, tuple[float, str]] = {}
    for name, (want, got, where) in pairs.items():
        if want.shape != got.shape or want.dtype != got.dtype:
            wrong[name] = np.inf, f"{where}: {want.dtype}{want.shape} became {got.dtype}{got.shape}"
        elif want.size:
            one, other = want.astype(np.float64), got.astype(np.float64)
            error = float(np.abs(one - other).max() / max(np.abs(one).max(), 1e-30))
            if not error <= TOLERANCE:
                wrong[name] = error, where
    return wrong


def inputs_of(source: FrameworkModel, batch: int, seed: int = 0, size: int = 41) -> dict[str, Array]:
    """Normal values; the free dimensions are ``batch`` on axis 0, and about ``size`` on the others."""
    random = np.random.default_rng(seed)
    return {
        spec.name: random.normal(
            size=[dim if dim >= 0 else batch if not axis else size + axis for axis, dim in enumerate(spec.shape)]
        ).astype(spec.datatype.dtype)
        for spec in source.signature.inputs
    }
