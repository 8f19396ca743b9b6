"""Check, before training, that the torch module and ONNX Runtime compute the same outputs."""

from __future__ import annotations

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidModel
from penstock.offline.compress.training.torch import torch
from penstock.offline.compress.training.trainable import TrainableModel, to_tensors
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import loaded
from penstock.tensor import Array

_ROWS_TO_LOCATE = 8


def parity(model: TrainableModel, data: Dataset, rows: int = 64) -> float:
    """The largest ``relative_error`` of the module's float outputs against ONNX Runtime without graph rewrites.

    Runs the first ``rows`` samples, or the model's fixed batch size, in one call. Call it before training, which changes the module.
    """
    rows = model.fixed_rows or min(rows, data.count)
    return max(_errors(model, model.artifact, data, rows).values(), default=0.0)


def check_parity(model: TrainableModel, data: Dataset, rows: int = 64, tolerance: float = 1e-5) -> float:
    """Return ``parity``. If it exceeds ``tolerance``, raise InvalidModel with the first tensor that differs."""
    error = parity(model, data, rows)
    if error <= tolerance:
        return error
    where = _first_divergence(model, data, tolerance)
    raise InvalidModel(
        f"the model's outputs in torch differ from those in ONNX Runtime: relative error {error:.2g}, tolerance {tolerance:.2g}"
        + (f"; first divergent tensor: {where}" if where else ""),
        "use a compression method without training, and report the operator",
    )


def relative_error(ours: Array, theirs: Array) -> float:
    """``max |ours - theirs| / max |theirs|``, or the difference if ``theirs`` is zero.

    Infinite if the shapes or the places of NaN and infinities differ.
    """
    if ours.shape != theirs.shape:
        return float("inf")
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True) or not np.isfinite(ours[finite]).all():
        return float("inf")
    difference = np.abs(ours[finite] - theirs[finite]).max(initial=0.0)
    magnitude = np.abs(theirs[finite]).max(initial=0.0)
    return float(difference / magnitude if magnitude else difference)


def _first_divergence(model: TrainableModel, data: Dataset, tolerance: float) -> str:
    """The first tensor, in graph order, whose error exceeds ``tolerance``; empty if none does."""
    proto = read_proto(model.artifact)
    shown = {value.name for value in proto.graph.output}
    kinds = {
        name: node.op_type
        for node in proto.graph.node
        for name in node.output
        if name and (node.op_type != "Constant" or name in shown)
    }
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in kinds if name not in shown)
    rows = model.fixed_rows or min(_ROWS_TO_LOCATE, data.count)
    errors = _errors(model, Artifact.from_bytes(proto.SerializeToString()), data, rows, also=tuple(kinds))
    return next((f"'{name}' ({kind})" for name, kind in kinds.items() if errors.get(name, 0.0) > tolerance), "")


def _errors(
    model: TrainableModel, artifact: Artifact, data: Dataset, rows: int, also: tuple[str, ...] = ()
) -> dict[str, float]:
    """Relative errors of the float outputs of ``artifact``. Integer outputs are skipped, because ties may be rounded differently."""
    sample = data.rows(0, rows)
    with loaded(artifact, as_written=True) as engine:
        theirs = engine.forward(sample)
    with torch.no_grad():
        ours = model(to_tensors(sample, model), also)
    return {
        name: relative_error(ours[name].detach().to(torch.float64).numpy(), array)
        for name, array in theirs.items()
        if name in ours and array.dtype.kind == "f"
    }
