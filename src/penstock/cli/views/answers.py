"""Runs pipelines on the items of a command line, and shows their answers: as JSON, and as boxes drawn on a picture."""

from __future__ import annotations

import json as json_text
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import InvalidArgument, NotFound, PenstockError, prefixed, shortened
from penstock.pipeline.value import Media, Value, ValueType, read_array
from penstock.runtime import Pipeline
from penstock.runtime.pipeline import MAX_FILE_BYTES
from penstock.samples.npz import read_npy
from penstock.storage.atomic import whole_file
from penstock.tensor import DataType

_STANDARD_INPUT = ("-", "/dev/stdin")


def infer_pipeline(
    bundle: Path, words: list[str], texts: list[str], picture: Path | None, allow_python: bool, json: bool
) -> None:
    """Run a pipeline on the items of a command line, and print its answers. Raises the error of the first item that fails."""
    with Pipeline.open(bundle, allow_python=allow_python) as pipeline:
        names = item_names(pipeline, words, texts)
        items = read_items(pipeline, words, texts)
        if picture is not None and len(items) != 1:
            raise InvalidArgument(f"--draw takes one item, but {len(items)} are given", "name one picture")
        if picture is not None and picture.suffix.lower() != ".png":
            raise InvalidArgument(
                f"--draw writes a PNG file, but the suffix of '{picture}' is not .png", "name a .png file"
            )
        start = time.perf_counter()
        answers, failure = [], None
        for name, item, told in zip(names, items, pipeline.stream(items, keep_errors=True), strict=True):
            if isinstance(told, PenstockError):
                failure = failure or prefixed(f"{shortened(name)}: ", told)
                answer: dict[str, Any] = {"item": name, "error": {"code": told.code.value, "message": told.message}}
            else:
                answer = {"item": name, "outputs": pipeline.to_json(told)}
                if picture is not None:
                    draw(pipeline, item, told, picture)
            answers.append(answer)
            if not json and len(items) > 1:
                print(_text(answer))
        seconds = time.perf_counter() - start
        if not json and len(items) == 1 and failure is None:
            print(_lines(answers[0]["outputs"]))
        facts = {
            "pipeline": pipeline.name,
            "items": answers,
            "seconds": seconds,
            "drawn": str(picture) if picture else None,
        }
    if picture is not None and failure is None and not json:
        print(f"drawn to {picture}", file=sys.stderr)  # stdout is JSON
    if failure is not None:
        failure.facts = facts
        raise failure
    if json:
        print(_text(facts))


def _text(content: Any) -> str:
    """``content`` as JSON. As in the answers of a server, NaN and infinities are written as ``NaN`` and ``Infinity``, not as null."""
    return json_text.dumps(content, ensure_ascii=False)


def _lines(outputs: Mapping[str, Any]) -> str:
    """``outputs`` as a JSON object with a line for each output, and for each row of an array, such as a box."""
    return "{\n" + ",\n".join(f"  {_text(name)}: {_rows(value)}" for name, value in outputs.items()) + "\n}"


def _rows(value: Any) -> str:
    if not (isinstance(value, list) and value and isinstance(value[0], list)):
        return _text(value)
    return "[\n" + ",\n".join(f"    {_text(row)}" for row in value) + "\n  ]"


def item_names(pipeline: Pipeline, words: Sequence[str], texts: Sequence[str]) -> list[str]:
    """What to call each item of ``read_items`` in answers."""
    return [" ".join(words)] if _is_one(pipeline, words) else [*words, *texts]


def read_items(pipeline: Pipeline, words: Sequence[str], texts: Sequence[str]) -> list[dict[str, Value]]:
    """The items on the command line. ``words`` are ``NAME=VALUE`` for each input of one item, or a value of the only input per item.

    A value is a text, the path of a file or, for a tensor, the path of an npy or a JSON file, or JSON. ``-`` is the standard input.
    ``texts`` are never paths. Raises InvalidArgument.
    """
    kinds = pipeline.inputs
    if not words and not texts:
        raise InvalidArgument("there is no item to run", "name a file, or give --text")
    if _is_one(pipeline, words) and not texts:
        found: dict[str, Value] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name in found:
                raise InvalidArgument(f"input '{name}' is given twice")
            found[name] = _value(kinds[name], value)
        return [found]
    if len(kinds) > 1:
        hint = " ".join(f"{name}=…" for name in kinds)
        raise InvalidArgument("the pipeline has several inputs", f"give them by name: {hint}")
    name, kind = next(iter(kinds.items()))
    if texts and kind.media is not Media.TEXT:
        raise InvalidArgument(f"input '{name}' is {kind.media.value}, not text", "name a file instead of --text")
    for word in words:
        other, equals, _ = word.partition("=")
        if equals and other.isidentifier() and kind.media is not Media.TEXT and not Path(word).exists():
            raise InvalidArgument(f"there is no input '{shortened(other)}'", f"the input is '{name}'")
    return [*({name: _value(kind, word)} for word in words), *({name: text} for text in texts)]


def _is_one(pipeline: Pipeline, words: Sequence[str]) -> bool:
    """True if all ``words`` are inputs of one item, by name."""
    return bool(words) and all("=" in word and word.partition("=")[0] in pipeline.inputs for word in words)


def _value(kind: ValueType, word: str) -> Value:
    if word in _STANDARD_INPUT:
        return _from_standard_input(kind)
    if kind.media is Media.TEXT:
        path = Path(word)
        if path.suffix.lower() not in (".txt", ".md"):
            return word
        if not path.is_file():
            raise NotFound(f"no file '{shortened(word)}'", "check the path; if it is a text, give it with --text")
        return path
    if kind.media is not Media.TENSOR:
        return Path(word)
    path = Path(word)
    try:
        if path.suffix.lower() == ".npy":
            return read_npy(path)
        return read_array(json_text.loads(path.read_text() if path.is_file() else word), kind.datatype)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"'{word}' is not an array of {kind.datatype.value}: {error}", "name an npy or a JSON file"
        ) from None


def _from_standard_input(kind: ValueType) -> Value:
    content = b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    if not content:
        raise InvalidArgument("the standard input is empty", "pipe one item into the command, and give - once")
    if len(content) > MAX_FILE_BYTES:
        raise InvalidArgument(f"the standard input has more than {MAX_FILE_BYTES} bytes", "give a smaller file")
    if kind.media not in (Media.TEXT, Media.TENSOR):
        return content
    try:
        text = content.decode("utf-8-sig")
        return text if kind.media is Media.TEXT else read_array(json_text.loads(text), kind.datatype)
    except (ValueError, RecursionError) as error:
        wanted = "UTF-8 text" if kind.media is Media.TEXT else f"an array of {kind.datatype.value} in JSON"
        raise InvalidArgument(f"the standard input is not {wanted}: {error}") from None


def draw(pipeline: Pipeline, item: Mapping[str, Value], outputs: Mapping[str, Value], target: Path) -> None:
    """Write a PNG with the boxes in ``outputs`` on the picture in ``item``, or the picture that the pipeline has drawn.

    Boxes are the only output of shape [n, 4] or [n, 4, 2]; the lists of texts and of numbers beside them are labels and scores. Raises
    InvalidArgument if there are none.
    """
    files = [
        value
        for name, value in outputs.items()
        if pipeline.outputs[name].media is Media.FILE and isinstance(value, bytes)
    ]
    if len(files) == 1:
        _write(target, files[0])
        return
    from penstock.pipeline.steps.boxes.draw import Draw  # noqa: PLC0415 - needs an extra, which few pipelines need
    from penstock.pipeline.steps.image.decode import DecodeImage  # noqa: PLC0415

    pictures = [name for name, kind in pipeline.inputs.items() if kind.media is Media.IMAGE]
    boxes = [name for name, kind in pipeline.outputs.items() if kind.shape[1:] in ((4,), (4, 2)) and name in outputs]
    if len(pictures) != 1 or len(boxes) != 1:
        hint = "add the step draw to the pipeline, and its picture to the outputs"
        raise InvalidArgument(
            f"--draw needs a picture and an output of boxes, but there are {len(pictures)} and {len(boxes)}", hint
        )
    given: dict[str, Value] = {"boxes": outputs[boxes[0]]}
    count = len(given["boxes"])
    for name, kind in pipeline.outputs.items():
        value = outputs.get(name)
        if value is None or len(value) != count:
            continue
        if kind.media is Media.TEXT and kind.many:
            given.setdefault("labels", value)
        elif kind.datatype is DataType.FP32 and len(kind.shape) + kind.many == 1:
            given.setdefault("scores", value)
    content = item[pictures[0]]
    pixels = DecodeImage().run({"value": Path(content).read_bytes() if isinstance(content, str | Path) else content})
    _write(target, Draw().run({"image": pixels["value"], **given})["picture"])


def _write(target: Path, content: bytes) -> None:
    with whole_file(target) as file:
        file.write(content)
