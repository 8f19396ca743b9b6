"""Sequences of calls of a stateful model: the user gives the other inputs, and the states are those that the model returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from penstock.dataset import LABELS
from penstock.errors import InvalidData, PenstockError
from penstock.samples.hints import InputHints
from penstock.samples.values import from_python, typed
from penstock.tensor import Array, Signature, TensorSpec

SEQUENCE = "sequence"
"""Name of the number or text among the arrays of a sample that says to which sequence it belongs."""


def has_sequences(arrays: Mapping[str, Any], signature: Signature, hints: InputHints | None) -> bool:
    """True if ``arrays`` say to which sequence they belong, and the model has states to feed back."""
    return bool(hints and hints.states) and SEQUENCE in arrays and SEQUENCE not in signature.input_names


def check_states(arrays: Mapping[str, Any], hints: InputHints | None) -> None:
    """Raise InvalidData if ``arrays``, which say nothing about sequences, lack a state."""
    if hints and (missing := sorted(hints.states.keys() - arrays.keys())):
        raise InvalidData(
            f"no array for the state(s) {missing}",
            f"add '{SEQUENCE}', the number of each sample's sequence (in a folder: a subfolder for each), and Penstock makes the "
            "states; or give the states",
        )


class Feeder:
    """Adds the states to samples: zeros at the start of a sequence, or the states given there, then those that the model returned."""

    def __init__(self, signature: Signature, hints: InputHints) -> None:
        self._specs = {spec.name: spec for spec in signature.inputs}
        self._hints = hints
        self._known: set[Any] = set()
        self._current: Any = None
        self._next: dict[str, Array] = {}
        self.numbers: list[int] = []
        """For each sample, the number of its sequence."""

    def fill(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The sample ``arrays`` with the states of its call. Raises InvalidData."""
        if SEQUENCE not in arrays:
            raise InvalidData(
                f"some samples have '{SEQUENCE}', and some have none",
                "say for every sample to which sequence it belongs",
            )
        key = _key(arrays[SEQUENCE])
        is_first = not self.numbers or key != self._current
        if is_first and key in self._known:
            raise InvalidData(
                f"sequence {key!r} continues after another sequence", "put the samples of a sequence one after another"
            )
        self._known.add(key)
        self._current = key
        self.numbers.append(len(self._known) - 1)
        states = self._hints.states
        found = {
            name: _with_axis(self._specs[name], value)
            for name, value in arrays.items()
            if name in self._specs and name not in states
        }
        rest = {name: arrays[name] for name in (LABELS,) if name in arrays and name not in self._specs}
        first = {name: arrays[name] if name in arrays else self._zeros(name, found) for name in states if is_first}
        return found | rest | (first or self._next)

    def advance(self, inputs: Mapping[str, Array]) -> None:
        """Run the model on the filled sample ``inputs``, for the states of the next one. Raises InvalidData."""
        try:
            outputs = self._hints.forward(inputs)
        except PenstockError as error:
            raise InvalidData(error.message, error.hint) from None
        self._next = {name: outputs[output] for name, output in self._hints.states.items()}

    def _zeros(self, name: str, inputs: Mapping[str, Array]) -> Array:
        """The state before the first call. Its only free axis is that of the rows of a call."""
        spec = self._specs[name]
        if spec.shape.count(-1) > 1:
            raise InvalidData(
                f"the first value of state '{name}' is unknown, because its shape {list(spec.shape)} has several free axes",
                "give it in the first sample of each sequence",
            )
        rows = [array.shape[0] for key, array in inputs.items() if self._specs[key].shape[:1] == (-1,) and array.ndim]
        shape = [(rows[0] if rows else 1) if size == -1 else size for size in spec.shape]
        return np.zeros(shape, spec.datatype.dtype)


def calls_in_sequences(arrays: Mapping[str, Array], signature: Signature) -> Iterator[dict[str, Any]]:
    """The samples of arrays whose first axis counts calls. An array with the shape of the input itself is for every call.

    Raises InvalidData if the arrays differ in their number of calls.
    """
    specs = {spec.name: spec for spec in signature.inputs}
    count = np.size(arrays[SEQUENCE])
    given = {name: np.asarray(arrays[name]) for name in (*specs, SEQUENCE, LABELS) if name in arrays}
    shared = {
        name
        for name, array in given.items()
        if name in specs and (not array.ndim or _is_one_call(specs[name], array.shape, count))
    }
    lengths = {name: len(np.atleast_1d(array)) for name, array in given.items() if name not in shared}
    if len(set(lengths.values())) > 1:
        raise InvalidData(f"arrays differ in number of samples: {lengths}", "give every array one row per sample")
    for number in range(count):
        yield {name: array if name in shared else np.atleast_1d(array)[number, ...] for name, array in given.items()}


def _is_one_call(spec: TensorSpec, shape: tuple[int, ...], count: int) -> bool:
    """True if an array of this shape is one call, not ``count`` rows."""
    return len(shape) == len(spec.shape) and (spec.shape[0] > 1 or (shape[0] == 1 and count > 1))


def _with_axis(spec: TensorSpec, value: Any) -> Array:
    """``value`` as an array, with the axis of rows if it lacks this axis."""
    array = typed(spec, from_python(spec, value))
    return array[np.newaxis] if array.ndim == len(spec.shape) - 1 and spec.shape[0] in (-1, 1) else array


def _key(value: Any) -> int | str | bytes:
    """The number or text that names a sequence."""
    array = np.asarray(value)
    found = array.reshape(-1).tolist()
    if len(found) != 1 or not isinstance(found[0], int | str | bytes):
        raise InvalidData(
            f"'{SEQUENCE}' is {array.dtype}{list(array.shape)}, not a whole number or text",
            "give one number or text per sample",
        )
    return found[0]
