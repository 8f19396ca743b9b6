"""Fill templates in from the files of a Hugging Face folder: ``preprocessor_config.json``, ``tokenizer_config.json``, labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.errors import InvalidArgument, Unsupported
from penstock.pipeline.templates.fill import Given, fill

METADATA = "penstock.huggingface"
"""Key of the ONNX metadata with the architecture, the labels, and the names of the files beside the model."""
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "area"}
"""Pillow's numbers of filters."""
_KNOWN_WORK = frozenset({"do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"})
_NO_LIMIT = 1 << 20
"""A tokenizer without a limit declares a larger one."""


class FilledTemplate(msgspec.Struct, frozen=True):
    """A declaration."""

    kind: str
    """The template."""
    text: str
    labels: tuple[str, ...]
    """Names of the classes; empty if the template needs none."""


def from_folder(given: Given, labels: Mapping[str, str], files: Mapping[str, Any], problem: str = "") -> FilledTemplate:
    """The declaration for a model. ``files`` has the content of the folder's JSON files by name.

    ``problem`` is the model's ``problem_type``: with ``multi_label_classification``, several classes of an item can be true.

    Raises Unsupported if there is no template for the model, or if its preprocessing has a part that no template has.
    """
    inputs = {spec.name for spec in given.signature.inputs}
    scores = any(spec.name == "logits" and len(spec.shape) == 2 for spec in given.signature.outputs)
    if scores and problem == "regression":
        raise Unsupported("the model is a regression, whose output is no score of a class")
    names = tuple(labels[key] for key in sorted(labels, key=int))
    if inputs == {"pixel_values"}:
        kind, options = "image-classifier" if scores else "embedding", _picture_options(files)
    elif "input_ids" in inputs:
        kind, options = "text-classifier" if scores else "embedding", text_options(files)
    else:
        raise Unsupported(f"there is no template for a model with the inputs {', '.join(sorted(inputs))}")
    count = next((spec.shape[1] for spec in given.signature.outputs if spec.name == "logits"), -1)
    if scores and count not in (-1, len(names)):
        raise Unsupported(f"the model has {count} classes, but its folder names {len(names)}")
    options = options | {"multi": problem == "multi_label_classification"}
    try:
        text = fill(kind, msgspec.structs.replace(given, options=options))
    except InvalidArgument as error:
        raise Unsupported(f"{error.message}; {error.hint}") from None
    return FilledTemplate(kind, text, names if scores else ())


def _picture_options(files: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the template for pictures. Raises Unsupported."""
    config = files.get("preprocessor_config.json")
    if not isinstance(config, dict):
        raise Unsupported("the folder has no preprocessor_config.json")
    does = {key for key, value in config.items() if key.startswith("do_") and value}
    if unknown := sorted(does - _KNOWN_WORK):
        raise Unsupported(f"the preprocessing has '{unknown[0]}', for which the template has no step")
    if "crop_pct" in config or "do_resize" not in does:
        raise Unsupported("the preprocessing does not resize pictures to one size")
    size, crop = config.get("size"), config.get("crop_size") if "do_center_crop" in does else None
    if config.get("resample", 2) not in _FILTERS:
        raise Unsupported(f"the preprocessing has the filter {config['resample']}, which no step has")
    normalises = "do_normalize" in does
    if normalises and not all(_is_numbers(config.get(name)) for name in ("image_mean", "image_std")):
        raise Unsupported("the preprocessing does not tell image_mean and image_std")
    return {
        "resize": _resize(size, crop is not None),
        "filter": _FILTERS[config.get("resample", 2)],
        "crop": _sides(crop) if crop is not None else "",
        "scale": config.get("rescale_factor", 1 / 255) if "do_rescale" in does else 1.0,
        "mean": config["image_mean"] if normalises else [0.0],
        "std": config["image_std"] if normalises else [1.0],
    }


def _resize(size: Any, is_cropped: bool) -> str:
    if isinstance(size, dict) and size.keys() == {"shortest_edge"} and is_cropped:
        return f"shortest: {size['shortest_edge']}"
    return f"size: {_sides(size)}"


def _sides(size: Any) -> list[int]:
    if isinstance(size, dict) and size.keys() >= {"height", "width"}:
        return [size["height"], size["width"]]
    if isinstance(size, int):
        return [size, size]
    raise Unsupported("the preprocessing does not resize pictures to one size")


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int | float) for each in value)


def text_options(files: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the templates for texts. Raises Unsupported."""
    if "tokenizer.json" not in files:
        raise Unsupported("the folder has no tokenizer.json, which a fast tokenizer of transformers saves")
    config = files.get("tokenizer_config.json") or {}
    pad = config.get("pad_token") or ""
    options = {
        "pad_token": pad.get("content", "") if isinstance(pad, dict) else pad,
        "padding_side": config.get("padding_side", "right"),
        "truncation_side": config.get("truncation_side", "right"),
    }
    limit = config.get("model_max_length", _NO_LIMIT)
    tokenise = {name: value for name, value in options.items() if value not in ("", "right")}
    return {"tokenise": tokenise} | ({"max_length": int(limit)} if 1 < limit < _NO_LIMIT else {})
