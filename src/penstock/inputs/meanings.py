"""Decides what each input of a model seems to mean, from the graph if there is one, from names, and from types and shapes.

The graph is the strongest sign, then the name, then type and shape. The result is a guess with its reason, never a proof.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from penstock.inputs.graph_signs import graph_meanings
from penstock.inputs.meaning import Meaning, Role
from penstock.rows.graph import OnnxModel
from penstock.tensor import DataType, Signature, TensorSpec

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_STATES = frozenset({"state", "states", "hidden", "cell", "cache", "past", "present", "memory", "h", "c", "hn", "cn"})
_DIRECTIONS = frozenset({"in", "out", "input", "output", "new", "next", "prev", "n", "past", "present"})
_DIRECTED = {"h0": "h", "hn": "h", "c0": "c", "cn": "c"}
_CHANNELS = (1, 3, 4)
_RATES = (8_000, 16_000)
_LARGEST_PIXEL = 255.0
_UNKNOWN_IDS = "; number of ids unknown"


class _Named(NamedTuple):
    """A role that follows from a word of the name, if the type and the shape are possible for it."""

    role: Role
    words: frozenset[str]
    fits: Callable[[TensorSpec], bool]


def _is_integer(spec: TensorSpec) -> bool:
    return not spec.datatype.is_float and spec.datatype not in (DataType.BYTES, DataType.BOOL)


def _is_single(spec: TensorSpec) -> bool:
    return all(dim == 1 for dim in spec.shape)


def _is_column(spec: TensorSpec) -> bool:
    """True if there is one number per sample."""
    return len(spec.shape) <= 1 or (len(spec.shape) == 2 and spec.shape[1] == 1)


_NAMES = (
    _Named(
        Role.SAMPLING_RATE,
        frozenset({"sr", "fs", "rate", "samplerate"}),
        lambda spec: _is_single(spec) and spec.datatype is not DataType.BYTES,
    ),
    _Named(Role.LENGTHS, frozenset({"len", "lens", "length", "lengths"}), lambda s: _is_integer(s) and _is_column(s)),
    _Named(
        Role.IMAGE_SIZE,
        frozenset({"shape", "size", "sizes"}),
        lambda spec: spec.datatype is not DataType.BYTES and len(spec.shape) <= 2 and spec.shape[-1:] == (2,),
    ),
    _Named(
        Role.MASK,
        frozenset({"mask", "masks"}),
        lambda spec: spec.datatype is not DataType.BYTES and (len(spec.shape) < 4 or not spec.datatype.is_float),
    ),
    _Named(Role.TOKEN_TYPES, frozenset({"type", "types", "segment", "segments"}), _is_integer),
    _Named(Role.POSITIONS, frozenset({"position", "positions", "pos"}), _is_integer),
    _Named(
        Role.TOKEN_IDS,
        frozenset({"ids", "id", "token", "tokens", "text", "word", "words", "src", "tgt"}),
        _is_integer,
    ),
    _Named(
        Role.SPECTRUM,
        frozenset({"mel", "mels", "fbank", "feats", "features", "spectrogram", "mfcc", "melspectrogram"}),
        lambda spec: spec.datatype.is_float and len(spec.shape) >= 3,
    ),
    _Named(
        Role.AUDIO,
        frozenset({"audio", "wav", "wave", "waveform", "speech", "pcm", "signal", "sound"}),
        lambda spec: spec.datatype is not DataType.BYTES and 1 <= len(spec.shape) <= 3,
    ),
    _Named(
        Role.IMAGE,
        frozenset({"image", "images", "img", "pixel", "pixels", "photo", "picture"}),
        lambda spec: bool(_image_layout(spec)),
    ),
)
"""In the order in which they are tried."""


def meanings_of(signature: Signature, model: OnnxModel | None = None) -> dict[str, Meaning]:
    """What each input of ``signature`` seems to mean, in the signature's order. ``model`` is the graph of an ONNX model."""
    from_graph = graph_meanings(model, signature) if model is not None else {}
    found = {
        spec.name: _refined(spec, from_graph.get(spec.name)) or _by_name(spec, signature) or _by_shape(spec)
        for spec in signature.inputs
    }
    if any(one.role is Role.SAMPLING_RATE for one in found.values()):
        for spec in signature.inputs:
            if found[spec.name].role in (Role.FEATURES, Role.TENSOR) and spec.datatype.is_float:
                found[spec.name] = Meaning(Role.AUDIO, "another input is a sampling rate")
    found |= {name: msgspec.structs.replace(one, role=Role.FEATURES) for name, one in _columns(signature, found)}
    return {name: _with_partner(name, one, signature, found) for name, one in found.items()}


def words_of(name: str) -> tuple[str, ...]:
    """The words of a name in lower case: ``attentionMask_1`` has attention, mask and 1."""
    return tuple(word.lower() for word in _WORD.findall(name))


def _refined(spec: TensorSpec, meaning: Meaning | None) -> Meaning | None:
    """``meaning``, with the role that the name gives to ids and to a number with few values."""
    if meaning is None:
        return None
    named = _role_of_name(spec)
    if meaning.role is Role.TOKEN_IDS and named in (Role.TOKEN_TYPES, Role.POSITIONS):
        return msgspec.structs.replace(meaning, role=named)
    if meaning.role is Role.SCALAR and (named is Role.SAMPLING_RATE or set(meaning.choices) & set(_RATES)):
        return msgspec.structs.replace(meaning, role=Role.SAMPLING_RATE)
    return meaning


def _role_of_name(spec: TensorSpec) -> Role | None:
    words = set(words_of(spec.name))
    return next((one.role for one in _NAMES if words & one.words and one.fits(spec)), None)


def _by_name(spec: TensorSpec, signature: Signature) -> Meaning | None:
    reason = "by its name"
    if _returned(spec, signature):
        return Meaning(Role.STATE, "name and shape of an output")
    match _role_of_name(spec):
        case None:
            return None
        case Role.IMAGE:
            return _image(spec, reason)
        case Role.SAMPLING_RATE as role:
            return Meaning(role, reason, choices=(_RATES[1],))
        case role:
            low, high = ((0.0,), (1.0,)) if role is Role.MASK else ((), ())
            return Meaning(role, reason + _UNKNOWN_IDS * (role in (Role.TOKEN_IDS, Role.TOKEN_TYPES)), low, high)


def _by_shape(spec: TensorSpec) -> Meaning:
    if spec.datatype is DataType.BYTES:
        return Meaning(Role.TEXT, "elements are text or bytes")
    if spec.datatype is DataType.BOOL:
        return _truth(spec)
    return _numbers(spec)


def _truth(spec: TensorSpec) -> Meaning:
    if _is_single(spec):
        return Meaning(Role.SCALAR, "true or false; false assumed", choices=(0,))
    return Meaning(Role.MASK, "elements are true or false", (0.0,), (1.0,))


def _numbers(spec: TensorSpec) -> Meaning:
    shape = spec.shape
    if _image_layout(spec):
        return _image(spec, "by its shape")
    if _is_integer(spec) and len(shape) == 2 and shape[1] == -1:
        return Meaning(Role.TOKEN_IDS, f"integers of any length{_UNKNOWN_IDS}")
    if not shape:
        return Meaning(Role.SCALAR, "no axes")
    if spec.datatype.is_float and len(shape) <= 2 and shape[1:] != (-1,):
        return Meaning(Role.FEATURES, f"{shape[1] if len(shape) == 2 else 1} number(s) per row")
    return Meaning(Role.TENSOR, "neither graph, name nor shape show its meaning")


def _image(spec: TensorSpec, reason: str) -> Meaning:
    if spec.datatype is DataType.UINT8:
        return Meaning(Role.IMAGE, reason, (0.0,), (_LARGEST_PIXEL,), layout=_image_layout(spec))
    return Meaning(Role.IMAGE, f"{reason}; range assumed", (0.0,), (1.0,), layout=_image_layout(spec))


def _image_layout(spec: TensorSpec) -> str:
    """The layout if the shape is that of images; otherwise empty."""
    shape = spec.shape
    is_pixels = spec.datatype.is_float or spec.datatype in (DataType.UINT8, DataType.INT8)
    if not is_pixels or len(shape) not in (3, 4) or (len(shape) == 3 and spec.datatype is not DataType.UINT8):
        return ""
    batch = "N" if len(shape) == 4 else ""
    if shape[len(batch)] in _CHANNELS and shape[-1] not in (1, 3):
        return f"{batch}CHW"
    return f"{batch}HWC" if shape[-1] in _CHANNELS else ""


def _columns(signature: Signature, found: dict[str, Meaning]) -> list[tuple[str, Meaning]]:
    """Text and numbers, one for each row, are columns of a table if there are several of them."""
    roles = (Role.TEXT, Role.TENSOR)
    columns = [
        (spec.name, found[spec.name])
        for spec in signature.inputs
        if spec.shape and _is_column(spec) and found[spec.name].role in (*roles, Role.FEATURES)
    ]
    return [(name, one) for name, one in columns if one.role in roles] if len(columns) > 1 else []


def _with_partner(name: str, meaning: Meaning, signature: Signature, found: dict[str, Meaning]) -> Meaning:
    spec = next(each for each in signature.inputs if each.name == name)
    partner = ""
    if meaning.role is Role.STATE:
        partner = _returned(spec, signature) or _same_shape(spec, signature)
    elif meaning.role is Role.LENGTHS:
        measured = [each.name for each in signature.inputs if len(each.shape) >= 2 and each.name != name]
        partner = next((each for each in measured if found[each].role is not Role.STATE), "")
    return msgspec.structs.replace(meaning, partner=partner) if partner else meaning


def _returned(spec: TensorSpec, signature: Signature) -> str:
    """The output that has the name and shape of the state ``spec``; empty if there is none."""
    if not _is_state(spec) or len(spec.shape) < 2:
        return ""
    found = (each for each in signature.outputs if _is_state(each) and _may_be_equal(spec, each))
    return next((each.name for each in found if _undirected(each.name) == _undirected(spec.name)), "")


def _is_state(spec: TensorSpec) -> bool:
    return bool(_STATES & set(words_of(spec.name)))


def _undirected(name: str) -> tuple[str, ...]:
    """The words of ``name`` without those that distinguish an old state from a new one."""
    if name.lower() in _DIRECTED:
        return (_DIRECTED[name.lower()],)
    words = "_".join(words_of(name)).replace("key_values", "").split("_")
    return tuple(word for word in words if word and word not in _DIRECTIONS)


def _may_be_equal(one: TensorSpec, other: TensorSpec) -> bool:
    if one.datatype is not other.datatype or len(one.shape) != len(other.shape):
        return False
    return all(a == b or -1 in (a, b) for a, b in zip(one.shape, other.shape, strict=True))


def _same_shape(spec: TensorSpec, signature: Signature) -> str:
    """The only output that has the type and shape of ``spec`` exactly; empty if there are several or none."""
    names = [each.name for each in signature.outputs if (each.datatype, each.shape) == (spec.datatype, spec.shape)]
    return names[0] if len(names) == 1 else ""
