"""JPEG and H.264 frames of 1280×720, classified: streams of `penstock.open` against a loop that decodes with Pillow or PyAV, and runs
one picture after the other in ONNX Runtime with its defaults, on all cores. The loop runs an INT8 model.

1. The bundle that `penstock build` makes of this model. The build may choose another engine, so the outputs are not equal to the bit.
2. The same model in the same engine. The loop's calls use all cores, and only its decoding leaves cores idle, so overlap can gain
   little: a stream takes at least its CPU time divided by the number of cores. The speed-up that this allows is shown, from the CPU
   time of decoding and resizing, and of the model in the form that needs the least.
3. The rate of this stream against that of its halves, decoding and resizing, and the model, each alone on all cores. The halves share
   the cores, so the stream needs at least the sum of their times. The slower half alone is a bound only for halves on different
   hardware; it is shown, too.

A loop that runs the built model in its engine on all cores shows what the stream gains without the build.

The answers are compared by the outputs of the network. Its weights are random, so that one class has almost the whole score, and the
scores do not show whether the outputs are equal.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
from penstock.bundle.local import NO_LIMITS, DeviceLimits, load_variant
from penstock.bundle.local_models import LocalModels
from penstock.bundle.open import open_bundle
from penstock.bundle.pipeline import open_pipeline
from penstock.engines.base import LoadedModel
from penstock.errors import PenstockError
from penstock.pipeline.executor import Told
from penstock.pipeline.golden import observed
from penstock.pipeline.streaming.models import LocalModel
from penstock.pipeline.streaming.stages import Stages
from penstock.pipeline.value import Value
from penstock.pipeline.video import read_frames
from penstock.resources import usable_cores
from penstock.runtime import Pipeline
from penstock.tensor import Array

_TOLERANCE = 1e-5
_SPEEDUP, _OVERLAP = 2.0, 0.9
_BATCH = 8
_HALF = "model alone"
"""The names of the forms of the model begin with this."""


class Spent(NamedTuple):
    """What a run took."""

    wall_s: float
    cpu_s: float
    """Of all threads of the process."""


class Session(NamedTuple):
    """A model of Penstock, with the interface of an ONNX Runtime session that the loop uses."""

    model: LoadedModel

    def run(self, _: None, inputs: Mapping[str, Array]) -> list[Array]:
        """The outputs for ``inputs``."""
        return [*self.model.forward(inputs).values()]


def run(quick: bool) -> list[Row]:
    """The rows of this part."""
    count, rounds = (32, 2) if quick else (128, 6)
    distinct = jpegs(24, 1280, 720)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = quantised(network(folder))
        made = built(model, *((4, 5.0) if quick else (16, 20.0)), calibrate=False)
        bundle = pack(folder, model)
        ours, tuned = (stack.enter_context(Pipeline.open(one)) for one in (bundle, pack(folder, made.bundle)))
        all_cores = load_variant(open_bundle(made.bundle), DeviceLimits(threads=usable_cores())).loaded
        stack.callback(all_cores.unload)
        opened = open_pipeline(bundle)
        halves = LocalModels(opened, opened.function(), NO_LIMITS)
        stack.callback(halves.unload)
        serial = onnxruntime.InferenceSession(str(model))
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        asleep = onnxruntime.InferenceSession(str(model), options)
        inner = partial(Stages, observed(opened.function()), halves.streamed())
        sides = {
            **_sides(
                serial, asleep, Session(all_cores), ours, tuned, distinct, _clip(folder / "clip.mp4", distinct, count)
            ),
            **_halves(inner(("tensor",)), halves, distinct),
        }
        found = interleave({name: _timed(partial(side, count)) for name, side in sides.items()}, rounds)
        worst = _difference(inner(("logits",)), serial, distinct)
    return [
        *_rows(found, count, f"{made.chosen.name} against ONNX Runtime, both of the same INT8 model"),
        claim("largest difference of an output, by the largest output", worst, "", "<=", _TOLERANCE),
        build_row(made),
    ]


Run = Callable[[int], object]


def _sides(
    serial: Any, asleep: Any, serial_built: Any, ours: Pipeline, tuned: Pipeline, jpegs: Sequence[bytes], clip: Path
) -> dict[str, Run]:
    """What is compared, for a number of frames. ``clip`` has this number. The idle threads of ``asleep`` do not wait actively."""

    def looped(session: Any) -> Run:
        return lambda count: [by_hand.scores(session, by_hand.opened(one)) for one in _repeated(jpegs, count)]

    def streamed(pipeline: Pipeline) -> Run:
        return lambda count: list(pipeline.stream(_repeated(jpegs, count)))

    def played(pipeline: Pipeline) -> Run:
        return lambda _: list(pipeline.stream(frame.pixels for frame in read_frames(clip)))

    return {
        "serial": looped(serial),
        "ours": streamed(ours),
        "ours, built": streamed(tuned),
        "serial, built": looped(serial_built),
        "serial, sleeping threads": looped(asleep),
        "H.264, serial": lambda _: [by_hand.scores(serial, one) for one in _by_pyav(clip)],
        "H.264, serial, sleeping threads": lambda _: [by_hand.scores(asleep, one) for one in _by_pyav(clip)],
        "H.264, ours": played(ours),
        "H.264, ours, built": played(tuned),
    }


def _halves(prepare: Stages, models: LocalModels, jpegs: Sequence[bytes]) -> dict[str, Run]:
    """The halves of the stream, each alone on all cores: decoding and resizing, and the model in several forms."""
    single, streamed = models.single["net"], models.streamed()["net"]
    tensors = [_values(told)["tensor"] for told in prepare.stream({"image": one} for one in jpegs)]

    def called(model: LocalModel, size: int, at_once: int) -> Run:
        return lambda count: _calls(model, tensors, count, size, at_once)

    return {
        "decoding and resizing alone": lambda count: list(
            prepare.stream({"image": one} for one in _repeated(jpegs, count))
        ),
        f"{_HALF}, one call at a time": called(single, 1, 1),
        f"{_HALF}, a call per core": called(streamed, 1, usable_cores()),
        f"{_HALF}, a batch of {_BATCH} per core": called(streamed, _BATCH, usable_cores()),
    }


def _repeated(jpegs: Sequence[bytes], count: int) -> list[bytes]:
    return [jpegs[number % len(jpegs)] for number in range(count)]


def _rows(found: Mapping[str, Sequence[Spent]], count: int, chosen: str) -> list[Row]:
    wall = {name: [one.wall_s for one in spent] for name, spent in found.items()}
    forms = [name for name in found if name.startswith(_HALF)]
    prepare, model = wall["decoding and resizing alone"], list(map(min, *(wall[name] for name in forms)))
    least = [one.cpu_s for one in found["decoding and resizing alone"]]
    for number in range(len(least)):
        least[number] += min(found[name][number].cpu_s for name in forms)
    allowed = ratio(wall["serial"], [one / usable_cores() for one in least])
    slower = ratio(list(map(max, prepare, model)), wall["ours"])
    shared = ratio(list(map(sum, zip(prepare, model, strict=True))), wall["ours"])
    overlap = ratio(wall["serial, built"], wall["ours, built"])
    pairs = {
        "built: speed-up over the serial loop": ("serial", "ours, built"),
        "built, H.264: speed-up over the serial loop": ("H.264, serial", "H.264, ours, built"),
        "same model and engine: speed-up over the serial loop": ("serial", "ours"),
        "same model and engine, H.264: speed-up over the serial loop": ("H.264, serial", "H.264, ours"),
    }
    rows = [
        claim(
            name,
            ratio(wall[theirs], wall[ours]),
            "×",
            ">=",
            _SPEEDUP,
            note=chosen if name.startswith("built") else "",
        )
        for name, (theirs, ours) in pairs.items()
    ]
    rows += [
        claim("share of the rate that both halves allow on the same cores", shared, "×", ">=", _OVERLAP),
        fact("share of the slower half's rate", slower.value, "×", interval=slower),
        fact(
            "same model and engine: speed-up over the serial loop that the cores allow",
            allowed.value,
            "×",
            interval=allowed,
            note=f"the CPU time of both halves, divided by {usable_cores()} cores",
        ),
        fact("built: speed-up over a serial loop of the same engine", overlap.value, "×", interval=overlap),
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


def _calls(model: LocalModel, tensors: Sequence[Array], count: int, size: int, at_once: int) -> None:
    """Run ``count`` rows in calls of ``size`` rows, of which ``at_once`` are in progress at a time."""

    def call(start: int) -> object:
        rows = [tensors[number % len(tensors)] for number in range(start, min(count, start + size))]
        return model.forward({"input": np.stack(rows)})

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(call, range(0, count, size)))
