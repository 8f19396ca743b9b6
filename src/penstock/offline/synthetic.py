"""Makes plausible samples for a model, for users who have no data.

A model's answers on such samples show whether another version of it computes the same function. They say nothing about its accuracy
on real data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from penstock.artifact import Artifact, Format
from penstock.errors import InvalidArgument, InvalidModel, PenstockError
from penstock.inputs.meaning import Meaning, Role
from penstock.inputs.meanings import meanings_of
from penstock.inputs.sizes import Shapes, shapes_to_try
from penstock.inputs.values import plausible
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.verify import dimension_names
from penstock.offline.sessions import loaded, signature_of
from penstock.resources import usable_memory
from penstock.rows.graph import read_graph
from penstock.tensor import Array, Signature

Call = dict[str, Array]
"""The inputs of one call."""
Forward = Callable[[Mapping[str, Array]], Mapping[str, Array]]

_SEED = 1_411
_STEPS = 8
"""Calls of a sequence, after which a state starts with zeros again."""
_LARGEST_BYTES = 64 << 20
_MEMORY_PART = 8
"""Samples may take the machine's memory divided by this number."""
_FEWEST, _MOST = 16, 256


class Accepted(msgspec.Struct, frozen=True):
    """The shapes that a model accepts; empty if it rejects all that were tried, with the last reason."""

    shapes: Shapes
    failure: str = ""


def accepted_shapes(
    forward: Forward, signature: Signature, meanings: Mapping[str, Meaning], axes: Mapping[str, Sequence[str]]
) -> Accepted:
    """Run plausible inputs of several shapes until the model accepts one."""
    failure, tried = "", 0
    for shapes in shapes_to_try(signature, meanings, axes):
        tried += 1
        try:
            forward(plausible(signature, meanings, shapes, np.random.default_rng(_SEED)))
        except PenstockError as error:
            shown = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            failure = failure or f"{error.message}, on {shown}"
            continue
        return Accepted(shapes)
    return Accepted({}, f"{failure} ({tried} set(s) of sizes tried)")


def samples(
    signature: Signature,
    meanings: Mapping[str, Meaning],
    shapes: Shapes,
    count: int,
    forward: Forward | None = None,
    seed: int = _SEED,
) -> Iterator[Call]:
    """Yield ``count`` calls of ``shapes``. With ``forward``, states are those that the model returned for the call before."""
    rng = np.random.default_rng(seed)
    states = {name: one.partner for name, one in meanings.items() if one.role is Role.STATE and one.partner and forward}
    known: dict[str, Array] = {}
    for number in range(count):
        inputs = plausible(signature, meanings, shapes, rng)
        if states and number % _STEPS:
            inputs |= known
        yield inputs
        if forward is not None and states:
            outputs = forward(inputs)
            known = {
                name: outputs[partner]
                for name, partner in states.items()
                if outputs[partner].shape == inputs[name].shape
            }


def synthesize(artifact: Artifact, count: int | None = None, parts: int = 1) -> list[list[Call]]:
    """Make ``parts`` lists of ``count`` calls each for the ONNX model ``artifact``, all different.

    Without ``count``, there are as many as fit in 64 MiB, but from 16 to 256. Raises InvalidModel if the model rejects them,
    and InvalidArgument if they take too much memory.
    """
    axes = dimension_names(read_proto(artifact))
    with loaded(artifact) as model:
        signature = model.signature
        meanings = meanings_of(signature, read_graph(artifact.data) if artifact.format is Format.ONNX else None)
        accepted = accepted_shapes(model.forward, signature, meanings, axes)
        if accepted.failure:
            raise InvalidModel(
                f"the model rejects all synthetic samples: {accepted.failure}",
                "give real samples: --calibrate FILE.npz, --evaluate FILE.npz; `penstock inspect` says what the inputs seem to mean",
            )
        if count is None:
            count = default_count(signature, accepted.shapes)
        size = parts * count * _bytes_of(signature, accepted.shapes)
        if size > (most := usable_memory() // _MEMORY_PART) > 0:
            raise InvalidArgument(
                f"--synthetic {count}: these samples take {size / 2**30:.1f} GiB, and at most {most / 2**30:.1f} GiB are allowed",
                "give a smaller number",
            )
        made = list(samples(signature, meanings, accepted.shapes, parts * count, model.forward))
    return [made[part::parts] for part in range(parts)]


def default_count(signature: Signature, shapes: Shapes) -> int:
    """The number of samples that fit in 64 MiB, from 16 to 256."""
    return max(_FEWEST, min(_MOST, _LARGEST_BYTES // max(1, _bytes_of(signature, shapes))))


def _bytes_of(signature: Signature, shapes: Shapes) -> int:
    return sum(int(np.prod(shapes[spec.name])) * max(1, spec.datatype.itemsize) for spec in signature.inputs)


def check_synthetic(has_data: bool, prove_accuracy: bool) -> None:
    """Raise InvalidArgument if a build that makes samples was also given data, or has to prove its accuracy."""
    if has_data:
        raise InvalidArgument(
            "--synthetic cannot be combined with --calibrate or --evaluate", "remove --synthetic, or remove the data"
        )
    if prove_accuracy:
        raise InvalidArgument(
            "--prove-accuracy needs real data: synthetic samples show only fidelity to the original",
            "give --evaluate FILE.npz, or remove --prove-accuracy",
        )


def synthetic_notes(count: int) -> tuple[str, ...]:
    """The note on a build that calibrated on ``count`` synthetic samples, and judged on as many; none if ``count`` is 0."""
    note = (
        f"calibrated and judged on {count} synthetic samples each: accuracy means fidelity to the original on them, and is unknown on "
        "real data"
    )
    return (note,) if count else ()


def synthetic_data(artifact: Artifact, count: int | None = None) -> tuple[Call, Call]:
    """Samples for calibration and others for evaluation, each ``stacked``. Raises the errors of ``synthesize``."""
    calibration, evaluation = synthesize(artifact, count, parts=2)
    signature = signature_of(artifact)
    return stacked(calibration, signature), stacked(evaluation, signature)


def stacked(calls: Sequence[Call], signature: Signature) -> Call:
    """The calls in one array per input, joined along the axis of rows if there is one, otherwise along a new first axis."""
    join = np.concatenate if signature.has_rows else np.stack
    return {name: join([call[name] for call in calls]) for name in signature.input_names}
