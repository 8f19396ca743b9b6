"""720 JPEG frames of 1280×720, classified: the stream of `penstock.open` against a loop that decodes with Pillow, and runs one picture
after the other in ONNX Runtime with its defaults. Both run the same INT8 model.

The stream is also compared with its slower half: decoding and preparing alone, or the model alone, each on all cores. If both halves
are limited by the same cores, this bound cannot be reached: the stream then needs at least the sum of both times. It is compared with
this sum, too. As many H.264 frames are classified by the stream, and by such a loop over PyAV, which decodes in threads.

The loop runs its model on all cores, and only decoding leaves cores idle, so a stream of the same model can gain little: it takes at
least its CPU time divided by the number of cores. CPU times are shown; that of the loop includes threads that wait actively.

`penstock build` may choose another engine for the same INT8 model. The stream over such a bundle is measured, too, but only for
information: another engine rounds differently, so the outputs are not equal.

The answers are compared by the outputs of the network. Its weights are random, so that one class has almost the whole score, and the
scores do not show whether the outputs are equal.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import onnxruntime
from PIL import Image

from benchmarks.pipelines import by_hand
from benchmarks.pipelines.pictures import build_row, built, jpegs, network, pack, quantised
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


class Spent(NamedTuple):
    """What a run took."""

    wall_s: float
    cpu_s: float
    """Of all threads of the process."""


def run(quick: bool) -> list[Row]:
    """The rows of this part."""
    count, rounds = (36, 2) if quick else (720, 2)
    distinct = jpegs(24, 1280, 720)
    frames = [distinct[number % len(distinct)] for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        model = quantised(network(Path(folder)))
        bundle = pack(Path(folder), model)
        clip = _clip(Path(folder, "clip.mp4"), distinct, count)
        serial = onnxruntime.InferenceSession(str(model))
        made = built(model, *((4, 5.0) if quick else (16, 20.0)), calibrate=False)
        with Pipeline.open(bundle) as ours, Pipeline.open(pack(Path(folder), made.bundle)) as tuned:
            opened = open_pipeline(bundle)
            loaded = load_models(opened.models)
            inner = partial(Stages, observed(opened.function()), local_models(opened.models, loaded))
            worst = _difference(inner(("logits",)), serial, distinct)
            prepare = inner(("tensor",))
            tensors = [_values(told)["tensor"] for told in prepare.stream({"image": one} for one in distinct)]
            forward, size = loaded["net"].loaded.forward, opened.models["net"].manifest.serving.max_batch
            found = interleave(
                {
                    "serial": _timed(lambda: [by_hand.scores(serial, by_hand.opened(one)) for one in frames]),
                    "ours": _timed(lambda: list(ours.stream(frames))),
                    "ours, built": _timed(lambda: list(tuned.stream(frames))),
                    "prepare": _timed(lambda: list(prepare.stream({"image": one} for one in frames))),
                    "model": _timed(lambda: _calls(forward, tensors, count, 1)),
                    "model in batches": _timed(lambda: _calls(forward, tensors, count, size)),
                    "H.264, serial": _timed(lambda: [by_hand.scores(serial, one) for one in _by_pyav(clip)]),
                    "H.264, ours": _timed(lambda: list(ours.stream(frame.pixels for frame in read_frames(clip)))),
                },
                rounds,
            )
            loaded["net"].loaded.unload()
    return [
        *_rows(found, count),
        claim("largest difference of an output, by the largest output", worst, "", "<=", _TOLERANCE),
        build_row(made),
    ]


def _rows(found: Mapping[str, Sequence[Spent]], count: int) -> list[Row]:
    wall = {name: [one.wall_s for one in spent] for name, spent in found.items()}
    model = [min(pair) for pair in zip(wall["model"], wall["model in batches"], strict=True)]
    slower = [max(pair) for pair in zip(wall["prepare"], model, strict=True)]
    both = [sum(pair) for pair in zip(wall["prepare"], model, strict=True)]
    shared, engine = ratio(both, wall["ours"]), ratio(wall["serial"], wall["ours, built"])
    rows = [
        claim("speed-up over the serial loop", ratio(wall["serial"], wall["ours"]), "×", ">=", _SPEEDUP),
        claim("share of the slower half's rate", ratio(slower, wall["ours"]), "×", ">=", _OVERLAP),
        fact("share of the rate that both halves allow on the same cores", shared.value, "×", interval=shared),
        claim(
            "H.264: speed-up over the serial loop",
            ratio(wall["H.264, serial"], wall["H.264, ours"]),
            "×",
            ">=",
            _SPEEDUP,
        ),
        fact("ours, built: speed-up over the serial loop", engine.value, "×", interval=engine),
    ]
    for name, spent in found.items():
        wall_ms = 1e3 * float(np.median(wall[name])) / count
        cpu_ms = 1e3 * float(np.median([one.cpu_s for one in spent])) / count
        rows.append(fact(f"time per frame: {name}", wall_ms, "ms", note=f"{cpu_ms:.3g} ms of CPU time"))
    return rows


def _difference(ours: Stages, serial: onnxruntime.InferenceSession, jpegs: Sequence[bytes]) -> float:
    """The largest difference of an output of the network, by the largest output."""
    found = np.stack([_values(told)["logits"] for told in ours.stream({"image": one} for one in jpegs)])
    expected = np.stack([by_hand.logits(serial, by_hand.opened(one)) for one in jpegs])
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _values(told: Told) -> Mapping[str, Value]:
    if isinstance(told, PenstockError):
        raise told
    return told


def _by_pyav(path: Path) -> Iterator[Image.Image]:
    with av.open(str(path)) as container:
        container.streams.video[0].thread_type = "AUTO"
        for frame in container.decode(video=0):
            yield Image.fromarray(frame.to_ndarray(format="rgb24"))


def _clip(path: Path, jpegs: Sequence[bytes], count: int) -> Path:
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=30, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        pictures = [av.VideoFrame.from_image(by_hand.opened(one)) for one in jpegs]
        for number in range(count):
            picture = pictures[number % len(pictures)]
            picture.pts = number
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


def _timed(work: Callable[[], object]) -> Callable[[], Spent]:
    def run() -> Spent:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        work()
        return Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)

    return run


def _calls(forward: Callable[..., object], tensors: Sequence[Array], count: int, size: int) -> None:
    for start in range(0, count, size):
        rows = [tensors[number % len(tensors)] for number in range(start, min(count, start + size))]
        forward({"input": np.stack(rows)})
