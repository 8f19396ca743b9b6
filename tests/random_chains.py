"""Random chains of steps that belong together, such as those of a classifier of pictures, with inputs that fit them."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

MAP_SIZES = (0, 1, 2, 7, 300)
"""Numbers of elements of maps. More than 256 elements are not all in progress at once."""


class Link(NamedTuple):
    """A step of a chain. A value has a role, and a later value with the same role replaces it."""

    step: str
    """A standard step, ``map``, ``model NAME`` or ``python NAME``."""
    reads: str
    """Roles of the inputs, in the step's own order."""
    gives: str = ""
    """Roles of the outputs, in the step's own order. By default those of the inputs."""
    options: Mapping[str, Any] = {}

    @property
    def roles(self) -> list[str]:
        return (self.gives or self.reads).split()


class Chain(NamedTuple):
    """Links, with the inputs and constants that they read, by role."""

    links: list[Link]
    inputs: Mapping[str, dict[str, Any]] = {}
    constants: Mapping[str, Any] = {}


def tensor(*shape: int, datatype: str = "FP32") -> dict[str, Any]:
    return {"media": "tensor", "shape": list(shape)} | ({} if datatype == "FP32" else {"datatype": datatype})


def random_chain(random: Random) -> Chain:
    draws = (_picture, _picture, _detections, _quadrilaterals, _scores, _text, _sound, _texts, _rows)
    return random.choice(draws)(random)


def _picture(random: Random) -> Chain:
    """From a file to the planes that a model reads."""
    side, colour = random.choice((1, 3, 8, 31)), random.choice(("rgb", "bgr"))
    size = {"size": [side, random.choice((2, 5, 16))]}
    links = [Link("decode_image", "picture", "pixels", {"colour": colour})]
    geometry = (
        Link("resize", "pixels", "", size),
        Link("letterbox", "pixels", "", size),
        Link("crop", "pixels", "", size),
        Link("pad_image", "pixels", "", {"multiple_of": side}),
        Link("resize", "pixels", "", {"shortest": side}),
    )
    links += random.sample(geometry, random.randint(0, 2))
    if random.random() < 0.5:
        links.append(Link("colour", "pixels", "", {"source": colour, "to": "bgr" if colour == "rgb" else "rgb"}))
    numbers = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    links.append(Link("normalise", "pixels", "", random.choice((numbers, numbers, {}, {"mean": [0.5]}))))
    links.append(Link("layout", "pixels", "", {"order": "chw"}))
    if random.random() < 0.5:
        links.append(Link("model pixels", "pixels"))
    return Chain(links, {"picture": {"media": "image"}})


def _detections(random: Random) -> Chain:
    """From the outputs of a detector to a picture with boxes."""
    inputs = {"picture": {"media": "image"}}
    found = "boxes scores classes"
    match random.choice(("yolo", "detr", "ssd", "nms")):
        case "yolo":
            shape, version = random.choice((((9, 20), "v8"), ((20, 10), "v5")))
            inputs["value"] = tensor(*shape)
            links = [Link("decode_yolo", "value", found, {"version": version, "activation": "sigmoid"})]
        case "detr":
            inputs |= {"logits": tensor(9, 5), "raw": tensor(9, 4)}
            links = [Link("decode_detr", "logits raw", found)]
        case "ssd":
            inputs |= {"logits": tensor(9, 5), "raw": tensor(9, 4), "priors": tensor(9, 4)}
            links = [Link("decode_ssd", "logits raw priors", found)]
        case _:
            inputs |= {"boxes": tensor(6, 4), "scores": tensor(6), "classes": tensor(6, 10)}
            links = [Link("argmax", "classes", "", {"axis": -1})]
    links += [
        Link("nms", found, found),
        Link("decode_image", "picture", "pixels"),
        Link("scale_boxes", "boxes pixels", "boxes", {"size": [1, 1]}),
        Link("label", "classes", "labels", {"labels": "ten"}),
    ]
    if random.random() < 0.5:
        return Chain([*links, Link("crop_boxes", "pixels boxes", "crops"), Link("map", "crops")], inputs)
    return Chain([*links, Link("draw", "pixels boxes labels scores", "drawn", {"colour": "rgb"})], inputs)


def _quadrilaterals(random: Random) -> Chain:
    """From quadrilaterals, or a map of probabilities, to straight pictures of them."""
    inputs = {"picture": {"media": "image"}}
    links = [Link("decode_image", "picture", "pixels")]
    if random.random() < 0.5:
        inputs["map"] = tensor(30, 40)
        links.append(Link("contour_boxes", "map", "boxes scores", {"box_threshold": 0.0}))
    else:
        inputs["boxes"] = tensor(random.choice(MAP_SIZES[1:4]), 4, 2)
    links += [
        Link("scale_boxes", "boxes pixels", "boxes", {"size": random.choice(([1, 1], [30, 40]))}),
        Link("warp_boxes", "pixels boxes", "crops"),
        Link("map", "crops"),
    ]
    return Chain(links, inputs)


def _scores(random: Random) -> Chain:
    """From logits to labels."""
    links = [Link(random.choice(("softmax", "sigmoid", "l2_normalise")), "scores")]
    match random.choice(("top_k", "threshold", "label", "ctc_decode", "pool")):
        case "label":
            return Chain(
                [
                    *links,
                    Link("argmax", "scores", "classes", {"axis": 1}),
                    Link("label", "classes", "", {"labels": "ten"}),
                ],
                {"scores": tensor(random.choice((-1, 7)), 10)},
            )
        case "ctc_decode":
            options = {"labels": "ten", "softmax": True}
            return Chain([*links, Link("ctc_decode", "scores", "text score", options)], {"scores": tensor(9, 11)})
        case "pool":
            return Chain([*links, Link("pool", "scores")], {"scores": tensor(7, 4)})
        case step:
            options = {"labels": "ten"} | ({"at": 0.05} if step == "threshold" else {"k": 3})
            return Chain([*links, Link(step, "scores", "labels scores indices", options)], {"scores": tensor(10)})


def _text(random: Random) -> Chain:
    """From text to the results of a model of token ids."""
    links = [
        Link("normalise_text", "text", "", {"lower": True}),
        Link("tokenise", "text", "ids mask types"),
        Link("truncate_sequence", "ids", "", {"length": 7}),
        Link("pad_sequence", "ids", "ids own", {"length": random.choice((7, 8, 300))}),
        Link("model tokens", "ids"),
    ]
    return Chain([link for link in links if random.random() < 0.85], {"text": {"media": "text"}})


def _sound(random: Random) -> Chain:
    """From a file to features."""
    links = [Link("decode_audio", "sound", "samples", {"rate": 16000})]
    match random.choice(("log_mel", "whisper", "frames", "resample")):
        case "log_mel":
            links.append(Link("log_mel", "samples", "", {"rate": 16000, "n_fft": 64, "n_mels": 8, "hop": 100}))
        case "whisper":
            links.append(Link("whisper_log_mel", "samples", "", {"seconds": 1, "truncate": True, "n_mels": 80}))
        case "frames":
            links += [Link("frames", "samples", "frames", {"length": 33, "hop": 100}), Link("map", "frames")]
        case _:
            links.append(Link("resample", "samples", "", {"source_rate": 16000, "rate": 8000}))
    return Chain(links, {"sound": {"media": "audio"}})


def _texts(random: Random) -> Chain:
    """A map over texts."""
    links = [Link("python repeat", "count", "texts"), Link("map", "texts")]
    return Chain(links, {}, {"count": random.choice(MAP_SIZES)})


def _rows(random: Random) -> Chain:
    """A map over rows, or over arrays of different shapes."""
    step = random.choice(("python rows", "python rows", "python squares"))
    return Chain([Link(step, "x", "rows"), Link("map", "rows")], {"x": tensor(random.choice(MAP_SIZES[1:]))})
