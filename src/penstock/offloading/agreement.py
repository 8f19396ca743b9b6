"""Checks that the model on the server is the model on the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.errors import InvalidArgument, WrongResult
from penstock.tensor import Array, Signature


def check_same(here: Signature, there: Signature, name: str) -> None:
    """Raise InvalidArgument unless the server's model reads and returns the tensors of the model on the device."""
    for kind, own, served in (("input", here.inputs, there.inputs), ("output", here.outputs, there.outputs)):
        other = {spec.name: spec for spec in served}
        for spec in own:
            found = other.get(spec.name)
            if found is None or found.datatype is not spec.datatype or len(found.shape) != len(spec.shape):
                has = "has none" if found is None else f"has {found.datatype.value} {list(found.shape)}"
                raise InvalidArgument(
                    f"{kind} '{spec.name}' is {spec.datatype.value} {list(spec.shape)}, but model '{name}' on the server {has}",
                    "serve the same bundle there",
                )


def fitting(expected: Signature, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """The ``expected`` outputs of a server's answer. Raises WrongResult if one is missing, or has a wrong datatype or shape."""
    for spec in expected.outputs:
        found = outputs.get(spec.name)
        if found is None or found.dtype != spec.datatype.dtype or not spec.admits(found.shape):
            has = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise WrongResult(
                f"the server's output '{spec.name}' is {has}, not {spec.datatype.value} {list(spec.shape)}"
            )
    return {spec.name: outputs[spec.name] for spec in expected.outputs}


def check_equal(one: Mapping[str, Array], two: Mapping[str, Array], tolerance: float) -> None:
    """Raise WrongResult if an output differs by more than ``tolerance`` times its largest value, or, if it is no float, at all."""
    for name, mine in one.items():
        theirs = two[name]
        same = mine.shape == theirs.shape and np.array_equal(mine, theirs)
        if same or (mine.dtype.kind == "f" and mine.shape == theirs.shape and _near(mine, theirs, tolerance)):
            continue
        raise WrongResult(
            f"the server's output '{name}' differs from the device's by more than {tolerance:g} of its largest value",
            "serve the same bundle there, or raise `tolerance`",
        )


def _near(one: Array, two: Array, tolerance: float) -> bool:
    one, two = one.astype(np.float64), two.astype(np.float64)
    bound = tolerance * float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
    return bool(np.allclose(one, two, rtol=0, atol=bound, equal_nan=True))
