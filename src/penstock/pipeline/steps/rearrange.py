"""Reorder the axes of an array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import Step, wrong_type
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import DataType

_EXAMPLE = "write e.g. 'mels frames -> 1 frames mels'"


class Rearrange(Step, frozen=True, kw_only=True):
    """Reorder the axes of an array, and add or drop axes of size 1, as ``einops.rearrange`` does.

    ``pattern: "mels frames -> 1 frames mels"`` makes [1, frames, mels] of [mels, frames].
    """

    pattern: str
    """Names of the input's axes, ``->``, and the same names in the order of the result. ``1`` is an axis of size 1."""

    def __post_init__(self) -> None:
        before, after = self._sides()
        for side in (before, after):
            names = [name for name in side if name != "1"]
            if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
                raise InvalidConfig(f"step 'rearrange' cannot read the pattern '{self.pattern}'", _EXAMPLE)
        if different := {*before, *after} - {"1"} - ({*before} & {*after}):
            name = min(different)
            raise InvalidConfig(
                f"step 'rearrange' has the axis '{name}' on one side of '{self.pattern}' only", _EXAMPLE
            )

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The array with its axes in the other order. Raises InvalidConfig unless it has the axes of the pattern."""
        given, (before, after) = inputs["value"], self._sides()
        if given.many or (given.datatype is DataType.BYTES and given.media is not Media.TENSOR):
            raise wrong_type("rearrange", "value", "an array", given)
        if not _fits(given.shape, before):
            raise wrong_type("rearrange", "value", f"an array with the axes {', '.join(before)}", given)
        sizes = dict(zip(before, given.shape, strict=True)) | {"1": 1}
        shape = tuple(sizes[name] for name in after)
        return {"value": msgspec.structs.replace(given, media=Media.TENSOR, shape=shape, rate=0)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The same elements in the other order, contiguous in memory. Raises InvalidInput if an axis ``1`` has another size."""
        array, (before, after) = np.asarray(inputs["value"]), self._sides()
        if not _fits(array.shape, before):
            raise InvalidInput(f"'value' has the shape {list(array.shape)}, not [{', '.join(before)}]")
        named = [name for name in before if name != "1"]
        array = array.reshape([size for size, name in zip(array.shape, before, strict=True) if name != "1"])
        array = array.transpose([named.index(name) for name in after if name != "1"])
        sizes = iter(array.shape)
        return {"value": np.ascontiguousarray(array).reshape([1 if name == "1" else next(sizes) for name in after])}

    def _sides(self) -> tuple[list[str], list[str]]:
        before, arrow, after = self.pattern.partition("->")
        if not arrow:
            raise InvalidConfig(f"step 'rearrange' cannot read the pattern '{self.pattern}'", _EXAMPLE)
        return before.split(), after.split()


def _fits(shape: Sequence[int], axes: Sequence[str]) -> bool:
    return len(shape) == len(axes) and all(
        name != "1" or size in (1, -1) for size, name in zip(shape, axes, strict=True)
    )
