"""The same pipelines in a process (single calls, a batch, a stream, and 8 threads), over HTTP and gRPC with 8 requests at a time, and
over the frames of a video. Items of equal shapes share the calls of a model, in other batches each time. All outputs are compared bit
for bit.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import cv2
import msgspec
import numpy as np
import orjson
import soundfile
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from benchmarks import models
from benchmarks.pipelines.embedded import DECLARATION, MODEL
from benchmarks.pipelines.pictures import classifier, jpegs
from benchmarks.pipelines.trained import trained
from benchmarks.requests import grpc_request, post
from benchmarks.results import Row, claim
from benchmarks.servers import Server, penstock, split_cores
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.perf.grpc_client import GrpcConnector
from penstock.perf.http_client import AnswerHead, HttpSession
from penstock.perf.oip_client import infer_all
from penstock.pipeline.value import Value, ValueType
from penstock.pipeline.video import read_frames
from penstock.pipeline.wire import to_tensors
from penstock.protocol import messages
from penstock.runtime import Pipeline
from penstock.tensor import Array, DataType, from_wire

_AT_ONCE = 8


class _Found(msgspec.Struct, frozen=True):
    items: int
    ways: int
    wrong: int
    """Answers that differ in a bit from those of single calls."""
    details: str


_TEXTS = """\
name: texts
inputs:
  text: {media: text}
steps:
  - {step: tokenise, in: {text: text}, out: {input_ids: ids, attention_mask: mask}, padding: fixed, max_length: 32}
outputs: [ids, mask]
"""
_SOUNDS = """\
name: sounds
inputs:
  sound: {media: audio}
steps:
  - {step: decode_audio, in: sound, out: samples, rate: 16000}
  - {step: log_mel, in: samples, out: features, rate: 16000}
outputs: [features]
"""


def run(quick: bool) -> list[Row]:
    """The rows of this part."""
    count, cores = 8 if quick else 48, split_cores()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = _cases(folder, count) | trained(folder, count)
        frames = [frame.pixels for frame in read_frames(_clip(folder / "clip.mp4", count))]
        cases["frames of a video"] = cases["photographs"][0], frames
        found = {}
        for title, (bundle, items) in cases.items():
            with penstock(bundle, cores, "--grpc-port", "0") as server, Pipeline.open(bundle) as here:
                found[title] = _different(here, server, items)
    return [
        claim(
            f"{title}: answers that differ in a bit",
            float(one.wrong),
            "",
            "<=",
            0,
            note=f"{one.items} items × {one.ways} ways" + (f"; {one.details}" if one.wrong else ""),
        )
        for title, one in found.items()
    ]


def _cases(folder: Path, count: int) -> dict[str, tuple[Path, Sequence[Value]]]:
    """The bundle and the items of each case."""
    models.small_cnn(folder / "cnn.onnx")
    shutil.copy(MODEL, folder)
    tokenizer = Tokenizer(tokenizer_models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [f"Sentence {number} of {'many ' * (number % 9)}words" for number in range(count)]
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(special_tokens=["[PAD]", "[UNK]"], vocab_size=90))
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    digits = [cv2.imencode(".png", rng.integers(0, 256, (8, 8), np.uint8))[1].tobytes() for _ in range(count)]
    sounds = []
    for number in range(count):
        soundfile.write(path := folder / f"{number}.wav", rng.uniform(-0.5, 0.5, 8000 + 100 * number), 44_100)
        sounds.append(path.read_bytes())
    return {
        "digits": (_packed(folder, DECLARATION), digits),
        "photographs": (_packed(folder, classifier("photos", "cnn.onnx", 64)), jpegs(count, 320, 240)),
        "texts": (_packed(folder, _TEXTS), texts),
        "sounds": (_packed(folder, _SOUNDS), sounds),
    }


def _packed(folder: Path, declaration: str) -> Path:
    name = declaration.split(maxsplit=2)[1]
    (path := folder / f"{name}.yaml").write_text(declaration)
    pack_pipeline(path, bundle := folder / f"{name}.bundle")
    return bundle


def _clip(path: Path, count: int) -> Path:
    """A clip of ``count`` frames in H.264."""
    picture: Any = cv2.imdecode(np.frombuffer(jpegs(1, 320, 240)[0], np.uint8), cv2.IMREAD_COLOR_RGB)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        for number in range(count):
            shifted = np.ascontiguousarray(np.roll(picture, 3 * number, axis=1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shifted, format="rgb24")))
        container.mux(stream.encode())
    return path


def _different(here: Pipeline, server: Server, items: Sequence[Value]) -> _Found:
    """Compare the answers of all ways with those of single calls."""
    (name,) = here.inputs

    def tensors(told: Mapping[str, Value]) -> dict[str, Array]:
        return to_tensors(here._function, told)  # noqa: SLF001 - the form of the protocol

    expected = [tensors(here(item)) for item in items]
    contents = [_content(item) for item in items]
    requests = [{name: _element(content)} for content in contents]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        ways: dict[str, Callable[[], Sequence[Mapping[str, Array]]]] = {
            "batch": lambda: [tensors(told) for told in here.batch(items)],
            "stream": lambda: [tensors(told) for told in here.stream(items)],
            "threads": lambda: [tensors(told) for told in threads.map(here, items)],
            "HTTP binary": lambda: asyncio.run(
                infer_all(server.address, here.name, requests, binary=True, concurrency=_AT_ONCE)
            ),
            "HTTP as JSON": lambda: _by_json(here, server, name, contents),
            "gRPC": lambda: asyncio.run(_by_grpc(server, here.name, requests)),
        }
        answers = {title: ask() for title, ask in ways.items()}
    wrong = {
        title: [pair for pair in zip(told, expected, strict=True) if not _equal(*pair)]
        for title, told in answers.items()
    }
    details = [
        f"{len(pairs)} by {title}, by up to {max(_distance(*pair) for pair in pairs):.2g}"
        for title, pairs in wrong.items()
        if pairs
    ]
    return _Found(len(items), len(ways), sum(map(len, wrong.values())), ", ".join(details))


def _content(item: Value) -> bytes:
    """The item as a client sends it; pixels as a PNG file, which keeps all bits."""
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return item
    return cv2.imencode(".png", item[..., ::-1])[1].tobytes()


def _element(content: bytes) -> Array:
    array = np.empty(1, np.object_)
    array[0] = content
    return array


def _equal(one: Mapping[str, Array], two: Mapping[str, Array]) -> bool:
    return one.keys() == two.keys() and all(_bits(one[name]) == _bits(two[name]) for name in one)


def _distance(one: Mapping[str, Array], two: Mapping[str, Array]) -> float:
    """The largest difference of two numbers; infinite if shapes or texts differ."""
    found = 0.0
    for name, array in two.items():
        is_text = array.dtype.kind == "O"
        if name not in one or one[name].shape != array.shape or (is_text and _bits(one[name]) != _bits(array)):
            return math.inf
        if not is_text and array.size:
            found = max(found, float(np.abs(one[name].astype(np.float64) - array).max()))
    return found


def _bits(array: Array) -> object:
    is_text = array.dtype.kind == "O"
    return array.shape, [one if isinstance(one, bytes) else str(one).encode() for one in array.flat] if is_text else (
        str(array.dtype),
        array.tobytes(),
    )


def _by_json(here: Pipeline, server: Server, name: str, contents: Sequence[bytes]) -> list[dict[str, Array]]:
    """The answers of `POST …/run`. A number that is written as JSON is read again with the same bits."""
    kind = {"image": "image/png", "audio": "audio/wav", "text": "text/plain"}[here.inputs[name].media.value]
    asked = [post(server.address, f"/v2/models/{here.name}/run", one, kind) for one in contents]

    async def ask(requests: Sequence[bytes]) -> list[bytes]:
        session = HttpSession(server.address)
        try:
            return [(await session.ask(request)).body for request in requests]
        finally:
            session.close()

    async def ask_all() -> list[list[bytes]]:
        return await asyncio.gather(*(ask(asked[number::_AT_ONCE]) for number in range(_AT_ONCE)))

    bodies = asyncio.run(ask_all())
    answers = [orjson.loads(bodies[number % _AT_ONCE][number // _AT_ONCE]) for number in range(len(asked))]
    return [{name: _array(here.outputs[name], value) for name, value in answer.items()} for answer in answers]


def _array(kind: ValueType, value: Any) -> Array:
    """A list in JSON does not tell the shape of an array without elements."""
    array = np.array(value, kind.datatype.dtype)
    return array if array.size else array.reshape([max(0, size) for size in ((-1,) if kind.many else ()) + kind.shape])


async def _by_grpc(server: Server, model: str, requests: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    if server.grpc is None:
        raise RuntimeError(f"{server.address.url} says nothing of gRPC")
    connect, loop = GrpcConnector(), asyncio.get_running_loop()

    async def ask(requests: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        waiting = [loop.create_future()]

        def on_answer(lane: Any, head: AnswerHead) -> None:
            waiting[0].set_result(lane.body())

        def on_lost(_: Any, why: str) -> None:
            if not waiting[0].done():
                waiting[0].set_exception(RuntimeError(why))

        assert server.grpc is not None
        lane, found = await connect(server.grpc, on_answer, on_lost), []
        for number, request in enumerate(requests):
            waiting[0] = loop.create_future()
            lane.send(grpc_request(model, request), number, 0.0, 0.0)
            found.append(_answer(await waiting[0]))
        lane.drop("done")
        return found

    parts = await asyncio.gather(*(ask(requests[number::_AT_ONCE]) for number in range(min(_AT_ONCE, len(requests)))))
    return [parts[number % _AT_ONCE][number // _AT_ONCE] for number in range(len(requests))]


def _answer(body: bytes) -> dict[str, Array]:
    message = messages.ModelInferResponse.FromString(body)
    return {
        output.name: from_wire(raw, DataType(output.datatype), list(output.shape))
        for output, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    }
