"""Check before training that the torch module and ONNX Runtime compute the same outputs."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx

from penstock.dataset import Dataset
from penstock.errors import InvalidModel
from penstock.offline.compress.training.torch import Tensor, torch
from penstock.offline.compress.training.trainable import TrainableModel, to_tensors
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import loaded
from penstock.tensor import Array

_ROWS_AT_ONCE = 8
"""Number of rows for which all computed tensors are in memory at the same time."""


def parity(model: TrainableModel, data: Dataset, rows: int = 64) -> float:
    """The largest ``relative_error`` of the module's float outputs against ONNX Runtime without graph optimisations.

    Runs the first ``rows`` samples, or the model's fixed batch size, in one call. Call before training, which changes the module.
    """
    rows = model.fixed_rows or min(rows, data.count)
    return max(_errors(model, data, rows).values(), default=0.0)


def check_parity(model: TrainableModel, data: Dataset, rows: int = 64, tolerance: float = 1e-5) -> float:
    """Return ``parity``. If the outputs differ by more than ``tolerance``, raises InvalidModel, which names the first operator with a
    different result.

    If every operator agrees on the inputs that it has in ONNX Runtime, the module computes the same function. Outputs can then differ
    only because the model amplifies rounding errors, as an ArgMax over a tie does.
    """
    error = parity(model, data, rows)
    if error <= tolerance:
        return error
    wrong = {name: found for name, found in _node_errors(model, data, rows).items() if found > tolerance}
    if not wrong:
        return error
    kinds = {name: node.op_type for node in read_proto(model.artifact).graph.node for name in node.output}
    name = next(iter(wrong))
    raise InvalidModel(
        f"the model's outputs in torch differ from those in ONNX Runtime: relative error {error:.2g}, tolerance {tolerance:.2g}; "
        f"first divergent tensor: '{name}' ({kinds[name]})",
        "use a compression method without training, and report the operator",
    )


def relative_error(ours: Array, theirs: Array) -> float:
    """``max |ours - theirs| / max |theirs|``, or the difference if ``theirs`` is zero.

    Infinite if the shapes or the positions of NaN and infinities differ.
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


def _node_errors(model: TrainableModel, data: Dataset, rows: int) -> dict[str, float]:
    """The largest error of each computed tensor, in graph order, if its operator gets the inputs that ONNX Runtime computes."""
    proto = read_proto(model.artifact)
    shown = {value.name for value in proto.graph.output}
    names = dict.fromkeys(name for node in proto.graph.node for name in node.output if name)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in shown)
    step = model.fixed_rows or _ROWS_AT_ONCE
    samples = [data.rows(at, at + step) for at in range(0, model.fixed_rows or min(rows, data.count), step)]
    errors: dict[str, float] = {}
    theirs: dict[str, Array] = {}

    def replaced(name: str, value: Tensor) -> Tensor:
        error = relative_error(value.detach().to(torch.float64).numpy(), theirs[name])
        errors[name] = max(error, errors.get(name, 0.0))
        return torch.from_numpy(np.array(theirs[name].astype(np.float64))).to(value.dtype)

    hooks, model.value_hooks = (
        model.value_hooks,
        {name: partial(replaced, name) for name in names if model.computes(name)},
    )
    try:
        with loaded(artifact_of(proto), as_written=True) as engine, torch.no_grad():
            for sample in samples:
                theirs |= engine.forward(sample)
                model(to_tensors(sample, model))
    finally:
        model.value_hooks = hooks
    return errors


def _errors(model: TrainableModel, data: Dataset, rows: int) -> dict[str, float]:
    """Relative errors of the float outputs. Integer outputs are skipped, because a tie can be decided differently."""
    sample = data.rows(0, rows)
    with loaded(model.artifact, as_written=True) as engine:
        theirs = engine.forward(sample)
    with torch.no_grad():
        ours = model(to_tensors(sample, model))
    return {
        name: relative_error(ours[name].detach().to(torch.float64).numpy(), array)
        for name, array in theirs.items()
        if name in ours and array.dtype.kind == "f"
    }
