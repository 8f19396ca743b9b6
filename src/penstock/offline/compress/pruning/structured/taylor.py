"""First-order Taylor importance: the estimated change of the loss if a unit is removed. Needs the extra ``torch``."""

from __future__ import annotations

import numpy as np

from penstock.dataset import Dataset
from penstock.offline.compress.pruning.structured.cut import Structure
from penstock.offline.compress.pruning.structured.importance import Scores, gather
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.compress.training.torch import Tensor, functional, torch
from penstock.offline.compress.training.trainable import TrainableModel, to_tensors
from penstock.offline.judge.detect import scored_output
from penstock.offline.optimize.model import to_artifact
from penstock.tensor import Array


def by_taylor(
    structure: Structure, data: Dataset, *, batch_size: int = 16, on_progress: Progress = no_progress
) -> Scores:
    """The mean over batches of ``|Σ g w|``, summed over the weights w that read the unit. g is the gradient of w. The sum is the
    derivative of the loss with respect to a gate on the unit's output (Molchanov et al., "Importance Estimation for Neural Network
    Pruning", 2019, §3.1).

    The loss is the cross-entropy with the labels or, without labels, with the class that the model predicts. If outputs are not class
    scores, the loss is half their mean square. Small batches are more informative than one large batch. If the model makes few errors
    on the data, gradients are small, and other measures of importance give better results. Raises Unsupported if the model has
    operators that cannot be trained, InvalidData if the labels fit no output.
    """
    model = TrainableModel(to_artifact(structure.model))
    slots = [slot for slot in structure.slots if slot.role == "reads" and slot.value.name in model.weights]
    weights = [model.weights[slot.value.name or ""] for slot in slots]
    size = model.fixed_rows or batch_size
    scored = ""
    sums: list[Array] = [np.zeros(len(slot.labels)) for slot in slots]
    for start in range(0, data.count, size):
        outputs = model(to_tensors(data.rows(start, start + size), model))
        if start == 0:
            scored = _scored({name: value.detach().numpy() for name, value in outputs.items()}, data.classes)
        labels = None if data.classes is None else torch.from_numpy(data.classes[start : start + size].astype(np.int64))
        model.zero_grad()
        _loss(outputs, labels, scored).backward()
        for number, (slot, weight) in enumerate(zip(slots, weights, strict=True)):
            if weight.grad is not None:
                others = [axis for axis in range(weight.ndim) if axis != slot.axis]
                sums[number] += (weight.grad * weight.detach()).sum(dim=others).abs().numpy()
        on_progress(min(start + size, data.count), data.count)
    return gather(structure, list(zip(slots, sums, strict=True)))


def _scored(outputs: dict[str, Array], labels: Array | None) -> str:
    """The name of the output that has class scores; empty if no output has. The guess affects only the importance."""
    if labels is not None:
        return scored_output(outputs, labels)
    are_rows = all(array.ndim == 2 and array.shape[1] >= 2 and array.dtype.kind == "f" for array in outputs.values())
    return next(iter(outputs)) if are_rows else ""


def _loss(outputs: dict[str, Tensor], labels: Tensor | None, scored: str) -> Tensor:
    if not scored:
        floats = [value for value in outputs.values() if value.is_floating_point()]
        return torch.stack([value.square().mean() / 2 for value in floats]).sum()
    scores = outputs[scored]
    return functional.cross_entropy(scores, scores.detach().argmax(dim=1) if labels is None else labels)
