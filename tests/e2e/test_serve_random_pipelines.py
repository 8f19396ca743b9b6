"""Random pipelines, packed: ``penstock.open``, HTTP and gRPC give the same bits and errors."""

from __future__ import annotations

import base64
import json
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

import penstock
from declaration_forms import texts
from five_ways import Answered, FiveWays, Inputs
from http_servers import Client, post
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.errors import PenstockError, bounded
from penstock.pipeline.value import Media, Value
from penstock.pipeline.wire import to_json, to_tensors
from penstock.tensor import Array, as_bytes
from pipeline_parts import FILES, catalogue
from pipeline_ways import Case, check, draw, exact, expected, joined, outcome, own_threads
from processes import ServerProcess

_COMPARED = 400
"""Characters of an error that are compared: the server cuts out the middle of long ones, after it has added a prefix."""


class Packed:
    """The pipeline of a seed, in a repository of models."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.name = f"s{seed}"
        self.random = Random(seed)
        self.case: Case = draw(self.random)
        wanted = [expected(joined(self.case.function), catalogue().loaded, item) for item in self.case.items]
        self.items = list(zip(self.case.items, wanted, strict=True))
        self.bundle = folder / "models" / self.name / "1" / "model.bundle"
        self.bundle.parent.mkdir(parents=True)
        pack_pipeline(self._written(folder / self.name), self.bundle, allow_python=True)

    def _written(self, folder: Path) -> Path:
        """The declaration in ``folder``, with all it needs. Items that succeed are examples."""
        files = FILES | {path: catalogue().files[name] for name, path in self.case.data.get("models", {}).items()}
        examples = []
        for number, (item, want) in enumerate(self.items):
            if not want.errors and (example := self._example(item, f"{number}-", files)) is not None:
                examples.append(example)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        data = self.case.data | {"name": self.name} | ({"examples": examples} if examples else {})
        name, text = self.random.choice(list(texts(data)))
        (folder / name).write_text(text)
        return folder / name

    def _example(self, item: Mapping[str, Value], prefix: str, files: dict[str, bytes]) -> dict[str, Any] | None:
        found: dict[str, Any] = {}
        for name, value in item.items():
            if isinstance(value, bytes):
                files[prefix + name] = value
                found[name] = prefix + name
            elif isinstance(value, str):
                found[name] = value
            elif self.case.media[name] is Media.TENSOR and value.dtype != object and value.size:
                numbers = value if value.dtype.kind in "biu" else value.astype(float)
                if not np.isfinite(numbers).all():
                    return None
                found[name] = numbers.tolist()
            else:
                return None
        return found


def check_opened(one: Packed) -> None:
    with penstock.open(one.bundle, allow_python=True) as pipeline:
        for item, want in one.items:
            check(want, outcome(partial(pipeline.infer, item)))
        for (_, want), told in zip(one.items, pipeline.stream(one.case.items, keep_errors=True), strict=True):
            check(want, told)
    assert not own_threads()


def tensors(item: Mapping[str, Value]) -> dict[str, Array]:
    found = {}
    for name, value in item.items():
        if isinstance(value, str | bytes):
            found[name] = np.array([as_bytes(value)], object)
        else:
            found[name] = value if value.shape else value[None]
    return found


def plain(item: Mapping[str, Value]) -> dict[str, Any]:
    """The body of a request to ``run``. Raises UnicodeDecodeError for BYTES that are no text."""
    return {name: _plain(value) for name, value in item.items()}


def _plain(value: Value) -> Any:
    if isinstance(value, str | bytes):
        return value if isinstance(value, str) else base64.b64encode(value).decode()
    if value.dtype == object:
        texts: Any = np.frompyfunc(bytes.decode, 1, 1)(value)
        return texts.tolist() if value.ndim else texts
    return value.tolist() if value.dtype.kind in "biu" else value.astype(float).tolist()


class Question(NamedTuple):
    """A request, and what it should give: tensors or one of some errors."""

    one: Packed
    item: Mapping[str, Value]
    wanted: Mapping[str, Array]
    errors: Sequence[PenstockError]

    def ask(self, way: Callable[[str, Inputs], Answered]) -> None:
        """Ask for tensors."""
        answered = way(self.one.name, tensors(self.item))
        self.check_error(answered.error)
        found, wanted = (
            {name: exact(array) for name, array in some.items()} for some in (answered.outputs, self.wanted)
        )
        assert found == wanted, self

    def run(self, client: Client) -> None:
        """Ask for JSON."""
        try:
            body = json.dumps(plain(self.item)).encode()
        except UnicodeDecodeError:
            return
        answer = client.ask(post(body, "Content-Type: application/json\r\n", f"/v2/models/{self.one.name}/run"))
        if answer.status == 200:
            self.check_error("")
            should = json.dumps(to_json(self.one.case.function, self.wanted))
            assert json.dumps(json.loads(answer.body)) == json.dumps(json.loads(should)), self
        elif not any(isinstance(value, np.ndarray) and not value.size for value in self.item.values()):
            self.check_error(answer.error)  # lists cannot tell the shape of an array without elements

    def check_error(self, error: str) -> None:
        shown = error.removeprefix("in pipeline ").partition(", ")[2]  # after the name of the pipeline
        texts = [str(one) for one in self.errors]
        same = [text for text in texts if bounded(text)[:_COMPARED] == shown[:_COMPARED]]
        assert bool(texts) == bool(same) == bool(error), f"{error or 'an answer'!r}, not {texts or 'an answer'}: {self}"

    def __str__(self) -> str:
        return f"{self.one.name}: {self.one.case.data}"


def questions(one: Packed) -> Iterator[Question]:
    for item, want in one.items:
        if any(isinstance(item[name], np.ndarray) and one.case.media[name] is not Media.TENSOR for name in item):
            continue  # pixels and samples cannot be sent
        told = outcome(partial(to_tensors, one.case.function, want.outputs))
        yield Question(one, item, *(({}, (told,)) if isinstance(told, PenstockError) else (told, want.errors)))


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(100, 200), marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_packed_pipelines_give_the_same(seeds: range, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        everything = [Packed(seed, tmp_path) for seed in seeds]
        for one in everything:
            check_opened(one)
    arguments = ("--model-repository", str(tmp_path / "models"), "--allow-python")
    with (
        ServerProcess(arguments=arguments) as server,
        FiveWays(server.address, tmp_path) as ways,
        Client(server.address) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        everyone = [question for one in everything for question in questions(one)]
        assert len(everyone) > len(everything)
        for question in everyone:
            question.ask(ways.binary)
            question.run(client)
        for _ in threads.map(lambda question: question.ask(ways.raw), everyone * 2):  # steps of requests are batched
            pass
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.end()
    assert (code, "Traceback" in errors) == (0, False), errors
