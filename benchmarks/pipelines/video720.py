"""720 JPEG frames of 1280×720, classified: the stream of `penstock.open` against a loop that decodes with Pillow, and runs one picture
after the other in ONNX Runtime with its defaults. Both run the same INT8 model.

The stream is also compared with its slower half: decoding and preparing alone, or the model alone, each on all cores. If both halves
are limited by the same cores, this bound cannot be reached: the stream then needs at least the sum of both times. It is compared with
this sum, too. As many H.264 frames are classified by the stream, and by such a loop over PyAV with its default threads.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import onnxruntime
from PIL import Image

from benchmarks.pipelines.pictures import MEAN, SIDE, STD, jpegs, network, pack, quantised
from benchmarks.results import Row, claim, fact
from benchmarks.rounds import interleave, ratio
from penstock.bundle.pipeline import load_models, local_models, open_pipeline
from penstock.errors import PenstockError
from penstock.pipeline.executor import Told
from penstock.pipeline.golden import observed
from penstock.pipeline.streaming.stages import Stages
from penstock.pipeline.value import Value
from penstock.pipeline.video import read_frames
from penstock.runtime import Pipeline
from penstock.tensor import Array

_TOLERANCE = 1e-5
_SPEEDUP, _OVERLAP = 2.0, 0.9


def run(quick: bool) -> list[Row]:
    """The rows of this part."""
    count, rounds = (36, 2) if quick else (720, 2)
    distinct = jpegs(24, 1280, 720)
    frames = [distinct[number % len(distinct)] for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        model = quantised(network(Path(folder)))
        bundle = pack(Path(folder), model)
        with Pipeline.open(bundle) as ours:
            serial = _serial(model)
            scores = np.stack([told["scores"] for told in ours.stream(distinct)])
            worst = float(np.abs(scores - np.stack([serial(_opened(one)) for one in distinct])).max())
            opened = open_pipeline(bundle)
            loaded = load_models(opened.models)
            prepare = Stages(observed(opened.function()), local_models(opened.models, loaded), ("tensor",))
            tensors = [_values(told)["tensor"] for told in prepare.stream({"image": one} for one in distinct)]
            forward, size = loaded["net"].loaded.forward, opened.models["net"].manifest.serving.max_batch
            found = interleave(
                {
                    "serial": _timed(lambda: [serial(_opened(one)) for one in frames]),
                    "ours": _timed(lambda: list(ours.stream(frames))),
                    "prepare": _timed(lambda: list(prepare.stream({"image": one} for one in frames))),
                    "model": _timed(lambda: _batches(forward, tensors, count, size)),
                },
                rounds,
            )
            loaded["net"].loaded.unload()
            clip = _clip(Path(folder, "clip.mp4"), distinct, count)
            video = interleave(
                {
                    "H.264, serial": _timed(lambda: [serial(one) for one in _by_pyav(clip)]),
                    "H.264, ours": _timed(lambda: list(ours.stream(frame.pixels for frame in read_frames(clip)))),
                },
                1,
            )
    slower = [max(pair) for pair in zip(found["prepare"], found["model"], strict=True)]
    both = [sum(pair) for pair in zip(found["prepare"], found["model"], strict=True)]
    h264 = video["H.264, serial"][0] / video["H.264, ours"][0]
    found |= video
    times = {name: float(np.median(values)) for name, values in found.items()}
    return [
        claim("speed-up over the serial loop", ratio(found["serial"], found["ours"]), "×", ">=", _SPEEDUP),
        claim("share of the slower half's rate", ratio(slower, found["ours"]), "×", ">=", _OVERLAP),
        fact(
            "share of the rate that both halves allow on the same cores",
            (one := ratio(both, found["ours"])).value,
            "×",
            interval=one,
        ),
        claim("H.264: speed-up over the serial loop", h264, "×", ">=", _SPEEDUP),
        claim("largest difference of a score", worst, "", "<=", _TOLERANCE),
        *(fact(f"{count} frames: {name}", seconds, "s") for name, seconds in times.items()),
    ]


def _serial(model: Path) -> Callable[[Image.Image], Array]:
    session = onnxruntime.InferenceSession(str(model))
    mean, std = np.array(MEAN, np.float32), np.array(STD, np.float32)

    def classify(picture: Image.Image) -> Array:
        small = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        scaled = (np.asarray(small, np.float32) / 255 - mean) / std
        (logits,) = session.run(None, {"input": np.ascontiguousarray(scaled.transpose(2, 0, 1))[None]})
        powers: Array = np.exp(logits[0] - logits[0].max())
        scores: Array = powers / powers.sum()
        return scores

    return classify


def _values(told: Told) -> Mapping[str, Value]:
    if isinstance(told, PenstockError):
        raise told
    return told


def _opened(jpeg: bytes) -> Image.Image:
    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def _by_pyav(path: Path) -> Iterator[Image.Image]:
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield frame.to_image()


def _clip(path: Path, jpegs: Sequence[bytes], count: int) -> Path:
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=30, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        pictures = [av.VideoFrame.from_image(_opened(one)) for one in jpegs]
        for number in range(count):
            picture = pictures[number % len(pictures)]
            picture.pts = number
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run


def _batches(forward: Callable[..., object], tensors: Sequence[Array], count: int, size: int) -> None:
    for start in range(0, count, size):
        rows = [tensors[number % len(tensors)] for number in range(start, min(count, start + size))]
        forward({"input": np.stack(rows)})
