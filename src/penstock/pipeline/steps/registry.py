"""The table of standard steps. A step's module is imported when the step is first used, so that unused extras are not needed."""

from __future__ import annotations

from importlib import import_module

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig, Unsupported
from penstock.pipeline.steps.base import Step

_STEPS = {
    "argmax": "scores.ranking:Argmax",
    "colour": "image.channels:Colour",
    "constant": "constant:Constant",
    "contour_boxes": "boxes.contours:ContourBoxes",
    "crop": "image.geometry:CropImage",
    "crop_boxes": "boxes.cut:CropBoxes",
    "ctc_decode": "scores.ctc:CtcDecode",
    "decode_audio": "audio.decode:DecodeAudio",
    "decode_detr": "boxes.heads:DecodeDetr",
    "decode_image": "image.decode:DecodeImage",
    "decode_ssd": "boxes.heads:DecodeSsd",
    "decode_yolo": "boxes.heads:DecodeYolo",
    "draw": "boxes.draw:Draw",
    "frames": "audio.frames:Frames",
    "l2_normalise": "scores.embeddings:L2Normalise",
    "label": "scores.ranking:Label",
    "layout": "image.normalise:ImageLayout",
    "letterbox": "image.geometry:Letterbox",
    "log_mel": "audio.log_mel:LogMel",
    "nms": "boxes.nms:Nms",
    "normalise": "image.normalise:Normalise",
    "normalise_text": "text.normalise:NormaliseText",
    "pad_image": "image.geometry:PadImage",
    "pad_sequence": "text.sequence:PadSequence",
    "pool": "scores.embeddings:Pool",
    "rearrange": "rearrange:Rearrange",
    "resample": "audio.resample:Resample",
    "resize": "image.resize:Resize",
    "scale_boxes": "boxes.scale:ScaleBoxes",
    "sigmoid": "scores.activations:Sigmoid",
    "softmax": "scores.activations:Softmax",
    "threshold": "scores.ranking:Threshold",
    "tokenise": "text.tokenise:Tokenise",
    "top_k": "scores.ranking:TopK",
    "truncate_sequence": "text.sequence:TruncateSequence",
    "warp_boxes": "boxes.cut:WarpBoxes",
    "whisper_log_mel": "audio.log_mel:WhisperLogMel",
}
"""Name of a step -> its module below this folder, and its class."""

NAMES = tuple(sorted(_STEPS))


_PICTURES = frozenset({"cv2", "PIL", "simplejpeg"})
"""Libraries of the extra ``images``."""


def step_class(name: str) -> type[Step]:
    """The class of the step ``name``. Raises InvalidConfig if there is none, and Unsupported if its library is missing."""
    if name not in _STEPS:
        raise InvalidConfig(f"there is no step '{name}'", did_you_mean(name, NAMES))
    module, _, attribute = _STEPS[name].partition(":")
    try:
        found: type[Step] = getattr(import_module(f"penstock.pipeline.steps.{module}"), attribute)
    except ModuleNotFoundError as missing:
        if missing.name not in _PICTURES:
            raise
        raise Unsupported(f"step '{name}' needs {missing.name}", "pip install 'penstock[images]'") from missing
    return found
