"""Chooses sizes for the free dimensions of a model's inputs, by the role of each input.

Dimensions with the same name get the same size. A name may be a sum of other names and numbers, such as ``past + sequence``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from penstock.inputs.meaning import Meaning, Role
from penstock.tensor import Signature, TensorSpec

Shapes = dict[str, tuple[int, ...]]
"""Shapes of the inputs, by name."""

_PIXEL_CHANNELS = 3
_BANDS = 80
_SUM = re.compile(r"[\w.]+(\s*\+\s*[\w.]+)+")


class FreeSizes(msgspec.Struct, frozen=True):
    """Sizes of free dimensions by kind."""

    pixels: int
    """Height and width of an image."""
    tokens: int
    """Length of a text."""
    samples: int
    """Length of audio."""
    frames: int
    """Length of a spectrum."""
    other: int


CHOICES = (
    FreeSizes(224, 32, 16_000, 100, 8),
    FreeSizes(64, 16, 512, 76, 1),
    FreeSizes(640, 128, 1_280, 16, 32),
    FreeSizes(256, 8, 4_096, 200, 64),
    FreeSizes(32, 64, 48_000, 32, 224),
)
"""The sizes to try, in order, until the model accepts the inputs."""


def shapes_to_try(
    signature: Signature,
    meanings: Mapping[str, Meaning],
    axes: Mapping[str, Sequence[str]] | None = None,
    rows: int = 1,
) -> Iterator[Shapes]:
    """The different shapes of the inputs that follow from ``CHOICES``. ``axes`` has the names of each input's dimensions.

    A free first axis has ``rows`` elements, and so has every dimension with its name, and the first free axis of a state.
    """
    seen: list[Shapes] = []
    for sizes in CHOICES:
        shapes = _shapes(signature, meanings, axes or {}, rows, sizes)
        if shapes not in seen:
            seen.append(shapes)
            yield shapes


def terms_of(name: str) -> list[str]:
    """The terms of a name that is a sum, such as ``past + sequence``; empty for other names."""
    return [part.strip() for part in name.split("+")] if _SUM.fullmatch(name) else []


def sum_of(terms: Sequence[str], known: Mapping[str, int]) -> int:
    """The size of a dimension whose name has ``terms``, which are numbers or names in ``known``."""
    return max(1, sum(int(term) if term.isdigit() else known.get(term, 0) for term in terms))


def free_axes(spec: TensorSpec) -> list[int]:
    """The free axes of ``spec`` other than the first."""
    return [axis for axis, size in enumerate(spec.shape) if size == -1 and axis]


def _shapes(
    signature: Signature,
    meanings: Mapping[str, Meaning],
    axes: Mapping[str, Sequence[str]],
    rows: int,
    sizes: FreeSizes,
) -> Shapes:
    known: dict[str, int] = {}
    for spec in signature.inputs:
        name = _names(spec, axes)[0] if spec.shape else ""
        if name and spec.shape[0] == -1 and not _SUM.fullmatch(name):
            known[name] = rows
    named = [name for spec in signature.inputs for name in _names(spec, axes) if name]
    for spec in sorted(signature.inputs, key=lambda each: meanings[each.name].role is Role.STATE):
        for axis, name in enumerate(_names(spec, axes)):
            if name and spec.shape[axis] == -1 and not _SUM.fullmatch(name):
                known.setdefault(name, _size(spec, axis, meanings[spec.name], rows, sizes))
    for name in filter(terms_of, named):
        known.setdefault(name, sum_of(terms_of(name), known))
    return {
        spec.name: tuple(
            size if size >= 0 else known[name] if name in known else _size(spec, axis, meanings[spec.name], rows, sizes)
            for axis, (size, name) in enumerate(zip(spec.shape, _names(spec, axes), strict=True))
        )
        for spec in signature.inputs
    }


def _names(spec: TensorSpec, axes: Mapping[str, Sequence[str]]) -> Sequence[str]:
    names = axes.get(spec.name, ())
    return names if len(names) == len(spec.shape) else ("",) * len(spec.shape)


def _size(spec: TensorSpec, axis: int, meaning: Meaning, rows: int, sizes: FreeSizes) -> int:
    """The size of the free dimension ``axis``."""
    if axis == 0 or (meaning.role is Role.STATE and axis == spec.shape.index(-1)):
        return rows
    last = axis == len(spec.shape) - 1
    found = sizes.other
    match meaning.role:
        case Role.IMAGE:
            found = _PIXEL_CHANNELS if meaning.layout[axis : axis + 1] == "C" else sizes.pixels
        case Role.TOKEN_IDS | Role.TOKEN_TYPES | Role.POSITIONS | Role.MASK:
            found = sizes.tokens
        case Role.AUDIO:
            found = sizes.samples if last else 1
        case Role.SPECTRUM:
            found = _BANDS if last and -1 in spec.shape[1:-1] else sizes.frames
        case Role.FEATURES if last and len(meaning.low) > 1:
            found = len(meaning.low)  # one bound per column
    return found
