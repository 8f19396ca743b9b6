"""Whether the torch module answers as ONNX Runtime does: asked before anything is trained."""

from __future__ import annotations

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidModel
from penstock.offline.compress.training.torch import Tensor, torch
from penstock.offline.compress.training.trainable import TrainableModel, to_tensors
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import loaded
from penstock.tensor import Array

_ROWS_TO_LOCATE = 8


def parity(model: TrainableModel, data: Dataset, rows: int = 64) -> float:
    """The largest relative error of the module's float outputs against ONNX Runtime, graph rewrites off.

    On the first ``rows`` samples, in one call, or in one of the model's fixed batch. The error of a tensor is
    ``max |ours - theirs| / max |theirs|``, infinite where shapes, NaN or infinities differ. The weights of the module are
    those of its graph only before training.
    """
    rows = model.fixed_rows or min(rows, data.count)
    return max(_errors(model, model.artifact, data, rows).values(), default=0.0)


def check_parity(model: TrainableModel, data: Dataset, rows: int = 64, tolerance: float = 1e-5) -> float:
    """``parity`` if it is at most ``tolerance``. Raises InvalidModel, which names the first tensor that differs, if not."""
    error = parity(model, data, rows)
    if error <= tolerance:
        return error
    where = _first_divergence(model, data, tolerance)
    raise InvalidModel(
        f"the model computes otherwise in torch than in ONNX Runtime: relative error {error:.2g}, tolerance {tolerance:.2g}"
        + (f"; first divergent tensor: {where}" if where else ""),
        "compress it by methods that need no training, and report the operator",
    )


def relative_error(ours: Array, theirs: Array) -> float:
    """``max |ours - theirs| / max |theirs|``; where the magnitude is zero the difference itself."""
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
    """The first tensor in graph order, if any; of a model that ONNX Runtime lets show all of them."""
    proto = read_proto(model.artifact)
    made_by = {name: node.op_type for node in proto.graph.node for name in node.output if name}
    shown = {value.name for value in proto.graph.output}
    made_by = {name: kind for name, kind in made_by.items() if kind != "Constant" or name in shown}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made_by if name not in shown)
    showing = Artifact.from_bytes(proto.SerializeToString())
    rows = model.fixed_rows or min(_ROWS_TO_LOCATE, data.count)
    errors = _errors(model, showing, data, rows, also=tuple(made_by))
    return next((f"'{name}' ({kind})" for name, kind in made_by.items() if errors.get(name, 0.0) > tolerance), "")


def _errors(
    model: TrainableModel, artifact: Artifact, data: Dataset, rows: int, also: tuple[str, ...] = ()
) -> dict[str, float]:
    """Relative errors of the outputs of ``artifact``; integers, of which a tie may flip one, are left out."""
    sample = data.rows(0, rows)
    with loaded(artifact, as_written=True) as engine:
        theirs = engine.forward(sample)
    with torch.no_grad():
        ours = model(to_tensors(sample, model), also)
    return {
        name: relative_error(_numpy(ours[name]), array)
        for name, array in theirs.items()
        if name in ours and array.dtype.kind == "f"
    }


def _numpy(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().to(torch.float64).numpy())
