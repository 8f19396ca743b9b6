"""Fill a template in for a model, so that the declaration fits its inputs and outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from string import Template
from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidArgument
from penstock.tensor import Array, DataType, Signature, TensorSpec

_CONDITION = re.compile(r"\[(\w+)\] ")
_NAME = re.compile(r"[^A-Za-z0-9_]+")
_SIDE, _LARGE_SIDE, _LINE = 224, 640, (48, 320)
"""Sizes of pictures for models that take any size."""
_PICTURE = "a picture [N, C, H, W] or [N, H, W, C]"
_RATE, _HOP, _TOKENS = 16_000, 160, 512
_MELS = frozenset({13, 20, 23, 24, 26, 32, 40, 48, 60, 64, 80, 96, 120, 128, 160, 229, 256})
"""Usual numbers of mel bands and cepstral coefficients."""
_TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_NORMALISED = frozenset({"Softmax", "Sigmoid"})


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a model."""

    name: str
    """Name of the pipeline."""
    model: str
    """File of the model."""
    signature: Signature
    final_operator: str = ""
    """The ONNX operator that computes the output, if known."""
    recogniser: Given | None = None
    """The second model of ``ocr``."""
    options: Mapping[str, Any] = {}
    """Values of the template that are known from elsewhere, such as ``mean``."""


def fill(kind: str, given: Given) -> str:
    """The declaration of the template ``kind`` for a model. Raises InvalidArgument if the model does not fit the template."""
    facts = {"name": given.name, "model": json.dumps(given.model), **KINDS[kind](given)}
    lines = []
    for line in files(__package__).joinpath(f"{kind}.yaml").read_text().splitlines():
        match = _CONDITION.match(line)
        if match is None:
            lines.append(Template(line).substitute(facts))
        elif facts[match[1]]:
            lines.append(Template(f"  {line[match.end() :]}").substitute(facts))
    return "\n".join(lines) + "\n"


def class_count(kind: str, given: Given) -> int:
    """The number of labels that the template ``kind`` needs for a model; -1 if the signature does not tell."""
    if kind == "ocr":
        count = _recognised(given).shape[-1]
        return count - 1 if count > 0 else -1  # one class is the blank
    return _head(given)[2] if kind == "detector" else _scores(given).shape[-1]


def _picture(given: Given, default: tuple[int, int], wanted: str = _PICTURE) -> dict[str, Any]:
    """Facts about the only input, a picture. ``default`` is its size if it may have any, and ``wanted`` names it in errors."""
    spec = _only(given, wanted, lambda spec: _layout(spec) is not None)
    layout = _layout(spec)
    assert layout is not None
    channels, height, width = (spec.shape[layout.index(axis)] for axis in "CHW")
    floats, planes = spec.datatype.is_float, layout == "NCHW"
    filled = "normalised" if floats else "resized"
    return {
        "colour": "grey" if channels == 1 else "rgb",
        "size": [one if one > 0 else other for one, other in zip((height, width), default, strict=True)],
        "floats": floats,
        "planes": planes,
        "filled": filled,
        "tensor": "planes" if planes else filled,
        "scale": 1 / 255,
        "mean": [0.0] * (1 if channels == 1 else 3),
        "std": [1.0] * (1 if channels == 1 else 3),
        "input": json.dumps(spec.name),
    }


def empty_picture(given: Given) -> dict[str, Array]:
    """A call of a detector with one empty picture. Raises InvalidArgument if the model takes no picture."""
    facts, spec = _picture(given, (_LARGE_SIDE, _LARGE_SIDE)), given.signature.inputs[0]
    channels = max(spec.shape[1 if facts["planes"] else 3], 1)
    shape = (channels, *facts["size"]) if facts["planes"] else (*facts["size"], channels)
    return {spec.name: np.zeros((max(spec.shape[0], 1), *shape), spec.datatype.dtype)}


def _image_classifier(given: Given) -> dict[str, Any]:
    return _resized_picture(given) | _classes(given)


def _resized_picture(given: Given, wanted: str = _PICTURE) -> dict[str, Any]:
    """Facts about the only input, a picture of one size, with the options of its preprocessing."""
    facts = _picture(given, (_SIDE, _SIDE), wanted)
    crop = given.options.get("crop", "")
    if crop and not facts["floats"]:
        facts |= {"filled": "cropped", "tensor": "planes" if facts["planes"] else "cropped"}
    sized = "cropped" if crop else "resized"
    return facts | {
        "resize": f"size: {facts['size']}",
        "filter": "bilinear",
        "crop": crop,
        "sized": sized,
        **given.options,
    }


def _layout(spec: TensorSpec) -> str | None:
    if len(spec.shape) != 4:
        return None
    return "NCHW" if spec.shape[1] in (1, 3) else "NHWC" if spec.shape[3] in (1, 3) else None


def _detector(given: Given) -> dict[str, Any]:
    version, output, _ = _head(given)
    boxes = next((spec.name for spec in given.signature.outputs if spec.shape[-1:] == (4,)), "")
    return _picture(given, (_LARGE_SIDE, _LARGE_SIDE)) | {
        "yolo": version != "detr",
        "detr": version == "detr",
        "version": version,
        "output": json.dumps(output),
        "boxes": json.dumps(boxes),
    }


def _head(given: Given) -> tuple[str, str, int]:
    """The kind of a detector's output, its name, and the number of classes (-1 if unknown)."""
    outputs = [spec for spec in given.signature.outputs if len(spec.shape) == 3 and spec.datatype.is_float]
    boxes = [spec for spec in outputs if spec.shape[2] == 4]
    logits = [spec for spec in outputs if spec.shape[2] != 4]
    if len(outputs) == 2 and len(boxes) == len(logits) == 1:
        return "detr", logits[0].name, logits[0].shape[2]
    if len(outputs) == 1 and outputs[0].shape[1] > 0 and outputs[0].shape[1] != outputs[0].shape[2]:
        _, rows, columns = outputs[0].shape
        # There are more anchors than numbers for each of them, and a free size is that of the anchors.
        if columns < 0 or rows < columns:
            return "v8", outputs[0].name, rows - 4
    if len(outputs) == 1 and outputs[0].shape[2] > 5:
        return "v5", outputs[0].name, outputs[0].shape[2] - 5
    wanted = "the output of YOLO, [N, 4 + classes, anchors] or [N, anchors, 5 + classes], or of DETR, two outputs"
    raise _no_fit("outputs", given.signature.outputs, wanted)


def _ocr(given: Given) -> dict[str, Any]:
    reader, facts = given.recogniser, _picture(given, (_LARGE_SIDE, _LARGE_SIDE))
    found = _output(given, "a map of probabilities [N, 1, H, W]", lambda spec: len(spec.shape) in (3, 4))
    output = _recognised(given)
    assert reader is not None
    line = _picture(reader, _LINE)
    if not (facts["floats"] and line["floats"]):
        raise InvalidArgument(
            "the models of this template take floating-point pictures", "write the declaration yourself"
        )
    return facts | {
        "output": json.dumps(found.name),
        "recogniser": json.dumps(reader.model),
        "line_size": line["size"],
        "line_planes": line["planes"],
        "line_input": line["input"],
        "line_tensor": "line_planes" if line["planes"] else "line_normalised",
        "line_output": json.dumps(output.name),
        "softmax": "false" if reader.final_operator in _NORMALISED else "true",
    }


def _recognised(given: Given) -> TensorSpec:
    if given.recogniser is None:
        raise InvalidArgument("the template 'ocr' needs a second model, which reads lines", "give it with --recogniser")
    return _output(given.recogniser, "probabilities [N, time, classes]", lambda spec: len(spec.shape) == 3)


def _text_classifier(given: Given) -> dict[str, Any]:
    return _tokens(given) | _classes(given)


def _embedding(given: Given) -> dict[str, Any]:
    output = _output(given, "an embedding [N, width] or [N, tokens, width]", lambda spec: len(spec.shape) in (2, 3))
    pools = len(output.shape) == 3
    is_text = "input_ids" in given.signature.input_names
    return (_embedded_text(given, pools) if is_text else _embedded_picture(given)) | {
        "text": is_text,
        "picture": not is_text,
        "output": json.dumps(output.name),
        "pools": pools,
        "pooled": "pooled" if pools else "encoded",
        "pooling": "value: encoded, mask: attention_mask" if is_text else "value: encoded",
    }


def _embedded_text(given: Given, pools: bool) -> dict[str, Any]:
    absent = {"floats": False, "planes": False, "crop": ""}
    return _tokens(given, needs_mask=pools) | absent | {"item": "text", "example": "{text: A sentence.}"}


def _embedded_picture(given: Given) -> dict[str, Any]:
    facts = _resized_picture(given, f"input_ids of a text, or {_PICTURE}")
    wiring = f"{facts['input']}: {facts['tensor']}"
    return facts | {"wiring": wiring, "item": "picture", "example": "{image: photo.jpg}"}


def _tokens(given: Given, needs_mask: bool = False) -> dict[str, Any]:
    names = [spec.name for spec in given.signature.inputs]
    if "input_ids" not in names or not set(names) <= set(_TOKEN_INPUTS):
        raise InvalidArgument(
            f"the model has the inputs {', '.join(names)}",
            f"the template needs {', '.join(_TOKEN_INPUTS)}, or some of them",
        )
    length = next(spec.shape[-1] for spec in given.signature.inputs if spec.name == "input_ids")
    tokens = [name for name in _TOKEN_INPUTS if name in names or (needs_mask and name == "attention_mask")]
    return {
        "tokens": ", ".join(f"{name}: {name}" for name in tokens),
        "wiring": ", ".join(f"{name}: {name}" for name in names),
        "max_length": length if length > 0 else given.options.get("max_length", _TOKENS),
        "padding": "fixed" if length > 0 else "longest",
        "more": "".join(f", {name}: {json.dumps(value)}" for name, value in given.options.get("tokenise", {}).items()),
    }


def _audio_classifier(given: Given) -> dict[str, Any]:
    wanted = "samples [N, samples] or a spectrogram [N, mels, frames], also in another order or with axes of size 1"
    spec = _only(given, wanted, lambda spec: 1 <= len(_sizes(spec)) <= 2)
    sizes, mels = _sizes(spec), len(_sizes(spec)) == 2
    if sizes == [-1, -1]:
        raise InvalidArgument(
            f"input '{spec.name}' does not tell the number of mel bands", "export the model with a fixed one"
        )
    axes = ["mels", "frames"] if mels else ["samples"]
    in_order = not mels or _mels_first(*sizes)
    names = iter(axes if in_order else reversed(axes))
    pattern = " ".join("1" if size == 1 else next(names) for size in spec.shape[1:])
    count = sizes[-1 if in_order else 0]
    fixed, moves = count > 0, pattern.split() != axes
    sound = "fixed" if fixed else "samples"
    raw = "spectrogram" if mels else sound
    return {
        "rate": _RATE,
        "fixed": fixed,
        "length": (count - 1) * _HOP if mels else count,
        "mels": mels,
        "hop": _HOP,
        "n_mels": sizes[0 if in_order else 1] if mels else 0,
        "sound": sound,
        "input": json.dumps(spec.name),
        "moves": moves,
        "raw_sound": raw,
        "pattern": json.dumps(f"{' '.join(axes)} -> {pattern}"),
        "order": "   # CHECK: the model cannot tell mel bands from frames" if mels and min(sizes) > 0 else "",
        "tensor": "arranged" if moves else raw,
        **_classes(given),
    } | dict(given.options)


def _sizes(spec: TensorSpec) -> list[int]:
    """The sizes of the axes after the batch that are not 1; none if there are more than three axes after it."""
    return [size for size in spec.shape[1:] if size != 1] if len(spec.shape) <= 4 else []


def _mels_first(one: int, two: int) -> bool:
    """True if ``one`` is the number of mel bands, and ``two`` that of frames. A free size is that of frames."""
    if min(one, two) < 0:
        return one > 0
    return one in _MELS or two not in _MELS


def _tabular(given: Given) -> dict[str, Any]:
    inputs = {spec.name: _identifier(spec.name) for spec in given.signature.inputs}
    results = {
        spec.name: _identifier(f"out_{spec.name}" if spec.name in inputs else spec.name)
        for spec in given.signature.outputs
    }
    declared = [
        f"  {inputs[spec.name]}: "
        + ("{media: text}" if spec.datatype is DataType.BYTES else _tensor_type(spec, given.signature.batchable))
        for spec in given.signature.inputs
    ]
    return {
        "inputs": "\n".join(declared),
        "wiring": ", ".join(f"{json.dumps(own)}: {value}" for own, value in inputs.items()),
        "results": ", ".join(f"{json.dumps(own)}: {value}" for own, value in results.items()),
        "outputs": ", ".join(results.values()),
    }


def _tensor_type(spec: TensorSpec, batchable: bool) -> str:
    shape = list(spec.shape[1:] if batchable or spec.shape[:1] == (1,) else spec.shape)
    return f"{{media: tensor, datatype: {spec.datatype.value}, shape: {shape}}}"


def _identifier(name: str) -> str:
    found = _NAME.sub("_", name).strip("_") or "value"
    return found if found[0].isalpha() else f"value_{found}"


def _classes(given: Given) -> dict[str, Any]:
    output = _scores(given)
    logits, multi = given.final_operator not in _NORMALISED, bool(given.options.get("multi"))
    return {
        "output": json.dumps(output.name),
        "softmax": logits and not multi,
        "sigmoid": logits and multi,
        "single": not multi,
        "multi": multi,
        "raw": "logits" if logits else "probabilities",
        "k": min(5, output.shape[-1]) if output.shape[-1] > 0 else 5,
    }


def _scores(given: Given) -> TensorSpec:
    # One score per item has no softmax, and only one label.
    return _output(
        given,
        "scores [N, classes] of at least two classes",
        lambda spec: len(spec.shape) == 2 and spec.shape[1] != 1 and spec.datatype.is_float,
    )


def _only(given: Given, wanted: str, fits: Callable[[TensorSpec], bool]) -> TensorSpec:
    """The only input, which must fit."""
    inputs = given.signature.inputs
    if len(inputs) != 1 or not fits(inputs[0]):
        raise _no_fit("inputs", inputs, f"one input: {wanted}")
    return inputs[0]


def _output(given: Given, wanted: str, fits: Callable[[TensorSpec], bool]) -> TensorSpec:
    """The first output that fits."""
    for spec in given.signature.outputs:
        if fits(spec):
            return spec
    raise _no_fit("outputs", given.signature.outputs, wanted)


def _no_fit(what: str, specs: tuple[TensorSpec, ...], wanted: str) -> InvalidArgument:
    shown = ", ".join(f"'{spec.name}' {spec.datatype.value} {list(spec.shape)}" for spec in specs)
    return InvalidArgument(f"the model has the {what} {shown}", f"this template needs {wanted}")


KINDS: Mapping[str, Callable[[Given], dict[str, Any]]] = {
    "audio-classifier": _audio_classifier,
    "detector": _detector,
    "embedding": _embedding,
    "image-classifier": _image_classifier,
    "ocr": _ocr,
    "tabular": _tabular,
    "text-classifier": _text_classifier,
}
"""Name of a template -> the facts that it needs."""
