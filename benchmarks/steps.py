"""Standard steps of pipelines against their reference libraries: ``python -m benchmarks.steps``.

Both sides take the same array (or file) and return an array. A reference library that has tensors gets them, made beforehand, and
returns them, unless the row says that it takes arrays, which models return. The sides run in turn, in one thread, and the figure is
the ratio of their CPU times in a round, which other processes disturb least. Prints Markdown.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import cv2
import msgspec
import numpy as np
import scipy.special
import torch
from PIL import Image
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from benchmarks.rounds import interleave, ratio
from penstock.measurement import Interval
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.boxes.contours import ContourBoxes
from penstock.pipeline.steps.boxes.cut import WarpBoxes
from penstock.pipeline.steps.boxes.nms import Nms
from penstock.pipeline.steps.image.channels import Colour
from penstock.pipeline.steps.image.decode import DecodeImage
from penstock.pipeline.steps.image.fuse import fuse
from penstock.pipeline.steps.image.geometry import Letterbox
from penstock.pipeline.steps.image.normalise import ImageLayout, Normalise
from penstock.pipeline.steps.image.resize import Resize
from penstock.pipeline.steps.scores.activations import Sigmoid, Softmax
from penstock.pipeline.steps.scores.embeddings import L2Normalise, Pool
from penstock.pipeline.steps.scores.ranking import Argmax, TopK
from penstock.tensor import Array

_BLOCK_S = 0.01
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Call = Callable[[], object]


@contextmanager
def one_thread() -> Iterator[None]:
    """Run OpenCV, PyTorch and BLAS in one thread. Idle threads of OpenBLAS wait actively, which would add CPU time to both sides."""
    threads = cv2.getNumThreads(), torch.get_num_threads()
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        cv2.setNumThreads(threads[0])
        torch.set_num_threads(threads[1])


class Case(msgspec.Struct, frozen=True):
    """A step with its inputs, and the same work with its reference library."""

    name: str
    reference: str
    ours: Call
    theirs: Call


class Figure(msgspec.Struct, frozen=True):
    """Median CPU times of a case, in seconds. ``ratio`` is above 1 if the step is faster than the reference."""

    ours_s: float
    theirs_s: float
    ratio: Interval


def measure(case: Case, rounds: int = 15) -> Figure:
    """Time both sides in turn, after a first call each, which may prepare something."""
    case.ours()
    case.theirs()
    calls = [max(1, int(_BLOCK_S / _timed(call, 3))) for call in (case.ours, case.theirs)]
    times = interleave(
        {"ours": partial(_timed, case.ours, calls[0]), "theirs": partial(_timed, case.theirs, calls[1])}, rounds
    )
    ours, theirs = times["ours"], times["theirs"]
    return Figure(median(ours), median(theirs), ratio(theirs, ours))


def _timed(call: Call, times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - start) / times


def photo(height: int, width: int) -> Array:
    """Pixels that compress about as a photo does."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.int16)
    found: Array = np.clip(smooth + rng.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)
    return found


def _case(name: str, reference: str, step: Step, theirs: Call, **inputs: object) -> Case:
    return Case(name, reference, lambda: step.run(inputs), theirs)


def decoding() -> list[Case]:
    """Files of 1280 × 720 pixels."""
    cases = []
    for format in ("JPEG", "PNG", "WEBP"):
        file = io.BytesIO()
        Image.fromarray(photo(720, 1280)).save(file, format)
        content = file.getvalue()

        def pillow(content: bytes = content) -> Array:
            return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))

        def opencv(content: bytes = content) -> object:
            return cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)

        cases.append(_case(f"decode_image {format}", "Pillow", DecodeImage(), pillow, value=content))
        cases.append(
            _case(f"decode_image {format}", "OpenCV", DecodeImage(colour="bgr", like="opencv"), opencv, value=content)
        )
    return cases


def resizing() -> list[Case]:
    """From 1280 × 720 pixels to 224 × 224."""
    pixels = photo(720, 1280)
    tensor = torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32))[None]
    planes, real = torch.from_numpy(pixels).permute(2, 0, 1)[None], pixels.astype(np.float32)

    def pillow() -> Array:
        return np.asarray(Image.fromarray(pixels).resize((224, 224), Image.Resampling.BILINEAR))

    def opencv() -> object:
        return cv2.resize(pixels, (224, 224), interpolation=cv2.INTER_LINEAR)

    def antialiased() -> object:
        return torch.nn.functional.interpolate(tensor, (224, 224), mode="bilinear", antialias=True)

    def whole(antialias: bool) -> object:
        return torch.nn.functional.interpolate(planes, (224, 224), mode="bilinear", antialias=antialias)

    def in_floats() -> Array:  # as torchvision's ``Resize`` does, except in transforms v2 with AVX2
        one = torch.from_numpy(pixels).permute(2, 0, 1)[None].to(torch.float32)
        small = torch.nn.functional.interpolate(one, (224, 224), mode="bilinear", antialias=True)
        found: Array = small.round().clamp(0, 255).to(torch.uint8)[0].permute(1, 2, 0).numpy()
        return found

    def plain(mode: str = "bilinear") -> object:
        return torch.nn.functional.interpolate(tensor, (224, 224), mode=mode)

    return [
        _case("resize", "Pillow", Resize(size=(224, 224)), pillow, value=pixels),
        _case("resize", "OpenCV", Resize(size=(224, 224), like="opencv"), opencv, value=pixels),
        _case(
            "resize UINT8, antialias",
            "torchvision, in FP32",
            Resize(size=(224, 224), like="torch"),
            in_floats,
            value=pixels,
        ),
        _case(
            "resize UINT8, antialias",
            "PyTorch in whole numbers",
            Resize(size=(224, 224), like="torch"),
            partial(whole, True),
            value=pixels,
        ),
        _case(
            "resize UINT8",
            "PyTorch in whole numbers",
            Resize(size=(224, 224), like="torch", antialias=False),
            partial(whole, False),
            value=pixels,
        ),
        _case("resize FP32, antialias", "PyTorch", Resize(size=(224, 224), like="torch"), antialiased, value=real),
        _case("resize FP32", "PyTorch", Resize(size=(224, 224), like="torch", antialias=False), plain, value=real),
        _case(
            "resize FP32, area",
            "PyTorch",
            Resize(size=(224, 224), like="torch", filter="area"),
            lambda: plain("area"),
            value=real,
        ),
    ]


def preparing() -> list[Case]:
    """Letterbox, and normalise with layout, apart and fused."""
    pixels, large = photo(224, 224), photo(720, 1280)
    mean, std = torch.tensor(_MEAN).view(-1, 1, 1), torch.tensor(_STD).view(-1, 1, 1)
    tensor = torch.from_numpy(pixels)
    steps = [Normalise(mean=_MEAN, std=_STD), ImageLayout()]
    chain = [Resize(size=(224, 224)), *steps]

    def torchvision() -> object:
        return tensor.permute(2, 0, 1).contiguous().to(torch.float32).div(255).sub_(mean).div_(std)

    def apart(steps: list[Step], value: Array) -> Array:
        for step in steps:
            value = step.run({"value": value})["value"]
        return value

    def letterboxed() -> object:
        small = cv2.resize(large, (640, 360), interpolation=cv2.INTER_LINEAR)
        return cv2.copyMakeBorder(small, 140, 140, 0, 0, cv2.BORDER_CONSTANT, value=(114, 114, 114))

    return [
        _case("letterbox", "OpenCV", Letterbox(size=(640, 640)), letterboxed, value=large),
        _case(
            "colour to grey",
            "Pillow",
            Colour(source="rgb", to="grey"),
            lambda: np.asarray(Image.fromarray(large).convert("L")),
            value=large,
        ),
        _case("normalise + layout, fused", "torchvision's operations", fuse(steps), torchvision, value=pixels),
        _case(
            "normalise + layout, fused", "the same steps apart", fuse(steps), lambda: apart(steps, pixels), value=pixels
        ),
        _case(
            "resize + normalise + layout, fused",
            "the same steps apart",
            fuse(chain),
            lambda: apart(chain, large),
            value=large,
        ),
    ]


def suppression() -> list[Case]:
    """Boxes around 60 objects."""
    cases = []
    for count in (10, 100, 1000):
        rng = np.random.default_rng(0)
        centres = rng.integers(0, 600, (60, 2))[rng.integers(0, 60, count)]
        starts = (centres + rng.normal(0, 4, (count, 2))).astype(np.float32)
        sizes, scores = np.full_like(starts, 60), rng.random(count, np.float32)
        found, rectangles = np.concatenate([starts, starts + sizes], 1), np.concatenate([starts, sizes], 1)

        lists = rectangles.tolist(), scores.tolist()

        def selected(rectangles: Array = rectangles, scores: Array = scores) -> object:
            kept = cv2.dnn.NMSBoxes(rectangles.tolist(), scores.tolist(), 0.0, 0.45)
            return rectangles[kept], scores[kept]

        name = f"nms, {count} boxes"
        cases.append(
            _case(
                name,
                "OpenCV from lists",
                Nms(),
                partial(cv2.dnn.NMSBoxes, *lists, 0.0, 0.45),
                boxes=found,
                scores=scores,
            )
        )
        cases.append(_case(name, "OpenCV from and to arrays", Nms(), selected, boxes=found, scores=scores))
    return cases


def boxes() -> list[Case]:
    """A quadrilateral, and a map with 40 regions."""
    quads = np.array([[[100, 100], [300, 120], [300, 150], [100, 130]]], np.float32)
    target = np.array([[0, 0], [200, 0], [200, 30], [0, 30]], np.float32)
    pixels, chart = photo(720, 1280), np.zeros((640, 640), np.float32)
    for top in range(20, 600, 60):
        for left in range(20, 600, 150):
            chart[top : top + 20, left : left + 100] = 0.9

    def warped() -> object:
        matrix = cv2.getPerspectiveTransform(quads[0], target)
        return cv2.warpPerspective(pixels, matrix, (200, 30), borderMode=cv2.BORDER_REPLICATE, flags=cv2.INTER_CUBIC)

    def contours() -> object:
        regions, _ = cv2.findContours((chart > 0.3).astype(np.uint8) * 255, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
        found = []
        for region in regions:  # PaddleOCR's steps, without the enlargement
            points = np.array(sorted(cv2.boxPoints(cv2.minAreaRect(region)).tolist()))
            low = np.floor(points.min(0)).astype("int32").clip(0, 639)
            high = np.ceil(points.max(0)).astype("int32").clip(0, 639)
            mask = np.zeros(high[::-1] - low[::-1] + 1, np.uint8)
            cv2.fillPoly(mask, [(points - low).astype("int32")], [1])
            score = cv2.mean(chart[low[1] : high[1] + 1, low[0] : high[0] + 1], mask)[0]
            found.append((np.array(sorted(cv2.boxPoints(cv2.minAreaRect(points.astype(np.float32))).tolist())), score))
        return found

    return [
        _case("warp_boxes", "OpenCV", WarpBoxes(), warped, image=pixels, boxes=quads),
        _case("contour_boxes", "PaddleOCR's loop with OpenCV", ContourBoxes(), contours, value=chart),
    ]


def activations() -> list[Case]:
    """Logits of 10 classes, of 1000, and of 1000 for 32 items or time steps."""
    cases = []
    for name, shape in (("10", (10,)), ("1000", (1000,)), ("32 × 1000", (32, 1000))):
        logits = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        for step, ours, theirs, scipys in (
            ("softmax", Softmax(), torch.softmax, scipy.special.softmax),
            ("sigmoid", Sigmoid(), torch.sigmoid, scipy.special.expit),
        ):
            axis = (-1,) if step == "softmax" else ()
            references: dict[str, Call] = {
                "PyTorch": partial(theirs, torch.from_numpy(logits), *axis),
                "PyTorch from and to arrays": partial(_with_arrays, theirs, logits, *axis),
                "SciPy": partial(scipys, logits, *axis),
            }
            cases += [
                _case(f"{step} {name}", reference, ours, call, value=logits) for reference, call in references.items()
            ]
    return cases


def _with_arrays(function: Callable[..., torch.Tensor], value: Array, *axis: int) -> Array:
    found: Array = function(torch.from_numpy(value), *axis).numpy()
    return found


def scores() -> list[Case]:
    """Scores of 1000 classes, and 128 tokens."""
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    tokens = np.random.default_rng(0).normal(size=(128, 384)).astype(np.float32)
    mask = np.ones(128, np.int64)
    one, many, weights = torch.from_numpy(logits), torch.from_numpy(tokens), torch.from_numpy(mask)

    def top() -> object:
        values, indices = torch.topk(one, 5)
        return values.numpy(), indices.numpy(), [str(index) for index in indices.tolist()]

    def pooled() -> object:
        wide = weights.unsqueeze(-1).expand(many.size()).float()
        return (many * wide).sum(0) / wide.sum(0).clamp(min=1e-9)

    return [
        _case("top_k", "PyTorch", TopK(k=5), top, value=logits),
        _case("argmax", "PyTorch", Argmax(), lambda: many.argmax(-1), value=tokens),
        _case("pool", "PyTorch", Pool(), pooled, value=tokens, mask=mask),
        _case(
            "l2_normalise", "PyTorch", L2Normalise(), lambda: torch.nn.functional.normalize(many, dim=-1), value=tokens
        ),
    ]


def cases() -> list[Case]:
    """All cases."""
    return [*decoding(), *resizing(), *preparing(), *suppression(), *boxes(), *activations(), *scores()]


def report(cases: Iterable[Case]) -> None:
    """Measure ``cases``, and print them."""
    print("| step | reference | step, µs | reference, µs | ratio |\n|---|---|---:|---:|---:|")
    with one_thread():
        for case in cases:
            found = measure(case)
            low, high = found.ratio.low, found.ratio.high
            times = f"{found.ours_s * 1e6:.1f} | {found.theirs_s * 1e6:.1f} | {found.ratio.value:.2f} [{low:.2f}, {high:.2f}]"
            print(f"| {case.name} | {case.reference} | {times} |")


if __name__ == "__main__":
    report(cases())
