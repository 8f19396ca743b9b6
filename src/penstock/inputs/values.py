"""Makes values for the inputs of a model: plausible values by their meaning, or values of one kind for comparing two models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from penstock.inputs.meaning import Meaning, Role
from penstock.inputs.sizes import Shapes
from penstock.tensor import Array, DataType, Signature, TensorSpec

Kind = Literal["normal", "zeros", "large", "negative"]
"""Normally distributed values, or only zeros, large values or negative values."""

# The largest FP16 number is 65504. Activations can reach it after a few layers if inputs are 100.
_LARGE = {DataType.FP16: 8.0, DataType.BF16: 32.0}
_PATCH = 16
"""Pixels along the side of a patch of an image."""
_NOISE = 0.2
"""Share of noise in an image; the remainder is the same for a patch, as in photographs."""
_LOUDNESS = 0.1
_TONES = 3
_RATE = 16_000
_TEXTS = (b"0", b"1")
"""Valid as text, and as numbers for models that parse them."""


def draw(spec: TensorSpec, shape: Sequence[int], kind: Kind, rng: np.random.Generator) -> Array:
    """Values of one kind, independent of their meaning. Integers are 0 or 1, which are valid indices; large ones are at most 99."""
    datatype = spec.datatype
    if datatype is DataType.BYTES:
        return np.full(shape, b"a", np.object_)
    if not datatype.is_float:
        top = {"zeros": 1, "large": 2 if datatype is DataType.BOOL else 100}.get(kind, 2)
        return np.asarray(rng.integers(0, top, shape)).astype(datatype.dtype)
    normal = np.asarray(rng.standard_normal(shape))
    match kind:
        case "zeros":
            normal = np.zeros(shape)
        case "large":
            normal = normal * _LARGE.get(datatype, 100.0)
        case "negative":
            normal = -np.abs(normal)
    return normal.astype(datatype.dtype)


def plausible(
    signature: Signature, meanings: Mapping[str, Meaning], shapes: Shapes, rng: np.random.Generator
) -> dict[str, Array]:
    """Plausible values for all inputs. Masks and lengths agree: both say how much of each row is used."""
    used = rng.uniform(0.5, 1.0, 1 << 12)
    """The used share of each row; the first is 1, so that a single row is whole."""
    used[0] = 1.0
    found = {}
    for spec in signature.inputs:
        meaning, shape = meanings[spec.name], shapes[spec.name]
        if meaning.role is Role.LENGTHS:
            whole = shapes.get(meaning.partner, ())
            longest = _longest(whole, meanings.get(meaning.partner))
            values = np.maximum(1, np.resize(used, shape) * longest)
        elif meaning.role is Role.IMAGE_SIZE:
            values = np.resize(_image_size(meanings, shapes), shape)
        else:
            values = _values(spec, meaning, shape, used, rng)
        found[spec.name] = _as(spec.datatype, np.asarray(values))
    return found


def _values(spec: TensorSpec, meaning: Meaning, shape: tuple[int, ...], used: Array, rng: np.random.Generator) -> Array:
    if meaning.choices and meaning.role is not Role.SAMPLING_RATE:
        options = np.array(meaning.choices, np.object_ if spec.datatype is DataType.BYTES else None)
        return np.asarray(options[rng.integers(0, len(options), shape)])
    if meaning.role is Role.MASK:
        return _mask(shape, used)
    if meaning.role in _MAKERS:
        return _MAKERS[meaning.role](spec, meaning, shape, rng)
    if spec.datatype is DataType.BYTES:
        return np.array(_TEXTS, np.object_)[rng.integers(0, len(_TEXTS), shape)]
    if meaning.low and meaning.high:
        return _between(spec, meaning, shape, rng)
    return draw(spec, shape, "normal", rng)


def _between(spec: TensorSpec, meaning: Meaning, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    low, high = (_last_axis(bound, shape) for bound in (meaning.low, meaning.high))
    if spec.datatype.is_float:
        # A tree's threshold of infinity tells missing values from numbers, and bounds nothing.
        low = np.where(np.isfinite(low), low, np.where(np.isfinite(high), high, 1.0) - 2.0)
        high = np.where(np.isfinite(high), high, low + 2.0)
        return np.asarray(rng.uniform(low, high, shape))
    return np.asarray(rng.integers(np.int64(low), np.int64(high) + 1, shape))


def _last_axis(bound: tuple[float, ...], shape: tuple[int, ...]) -> Array:
    """``bound`` for the elements of ``shape``: one for each index of the last axis if there are so many, otherwise their mean."""
    values = np.array(bound)
    return values if len(bound) > 1 and shape[-1:] == (len(bound),) else values.mean()


def _as(datatype: DataType, values: Array) -> Array:
    if datatype is DataType.BYTES:
        return np.asarray(values, np.object_)
    if datatype.is_float or datatype is DataType.BOOL:
        return np.asarray(values, datatype.dtype)
    limits = np.iinfo(datatype.dtype)
    return np.asarray(np.clip(values, limits.min, limits.max)).astype(datatype.dtype)


def _mask(shape: tuple[int, ...], used: Array) -> Array:
    """One up to the used share of the last axis, then zero."""
    if len(shape) < 2:
        return np.ones(shape)
    share = np.resize(used, (shape[0], *(1 for _ in shape[1:])))
    return np.broadcast_to(np.arange(shape[-1]) < np.ceil(share * shape[-1]), shape)


def _longest(shape: tuple[int, ...], meaning: Meaning | None) -> int:
    """The axis of length of the input that lengths measure: the last for audio, otherwise the second."""
    if len(shape) < 2:
        return max(1, *shape) if shape else 1
    return shape[-1] if meaning is not None and meaning.role is Role.AUDIO else shape[1]


def _image_size(meanings: Mapping[str, Meaning], shapes: Shapes) -> tuple[int, int]:
    """Height and width of the first image."""
    for name, meaning in meanings.items():
        if meaning.role is Role.IMAGE and "H" in meaning.layout:
            at = meaning.layout.index("H")
            return shapes[name][at], shapes[name][at + 1]
    return 1, 1


def _positions(_: TensorSpec, meaning: Meaning, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    top = meaning.high[0] if meaning.high else np.inf
    return np.resize(np.minimum(np.arange(shape[-1] if shape else 1), top), shape)


def _rate(_: TensorSpec, meaning: Meaning, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """One rate, because the model may take a different number of samples at another."""
    return np.full(shape, max(meaning.choices, default=_RATE))


def _image(_: TensorSpec, meaning: Meaning, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Patches of one colour with noise."""
    if not meaning.layout or len(meaning.layout) != len(shape):
        coarse = rng.random(shape)
    else:
        height = meaning.layout.index("H")
        patches = [-(-size // _PATCH) if axis in (height, height + 1) else size for axis, size in enumerate(shape)]
        coarse = rng.random(patches).repeat(_PATCH, height).repeat(_PATCH, height + 1)
        coarse = coarse[tuple(slice(size) for size in shape)]
    mixed = (1 - _NOISE) * coarse + _NOISE * rng.random(shape)
    low, high = (bound[0] if bound else other for bound, other in ((meaning.low, 0.0), (meaning.high, 1.0)))
    return np.asarray(low + (high - low) * mixed)


def _audio(spec: TensorSpec, _: Meaning, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """A few tones with noise, quiet."""
    length = shape[-1] if shape else 1
    time = np.arange(length)
    tones = [np.sin(2 * np.pi * rng.uniform(0.005, 0.2) * time + rng.uniform(0, np.pi)) for _ in range(_TONES)]
    quiet = _LOUDNESS * (sum(tones) / _TONES + 0.3 * rng.standard_normal(shape))
    is_whole = not spec.datatype.is_float and spec.datatype is not DataType.BOOL
    full = np.iinfo(spec.datatype.dtype).max if is_whole else 1
    return np.asarray(np.clip(quiet, -1, 1) * full)


_MAKERS: Mapping[Role, Callable[[TensorSpec, Meaning, tuple[int, ...], np.random.Generator], Array]] = {
    Role.POSITIONS: _positions,
    Role.SAMPLING_RATE: _rate,
    Role.IMAGE: _image,
    Role.AUDIO: _audio,
    Role.STATE: lambda spec, meaning, shape, rng: np.zeros(shape),
    Role.SCALAR: lambda spec, meaning, shape, rng: np.ones(shape),
}
"""Make the values of roles that a range does not describe."""
