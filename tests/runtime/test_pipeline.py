from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock import Pipeline
from penstock.errors import InvalidArgument, NotFound, PenstockError, ResourceExhausted, Unavailable
from pipelines import FEATURES, SCORES, scores_bundle

ITEMS = [np.array([n, 1 - n, n / 3], np.float32) for n in range(20)]
TEXTS = """\
name: texts
inputs:
  text: {media: text}
  content: {media: file}
steps:
  - {python: my.py:both, in: {text: text, content: content}, out: [length, size]}
outputs: [length, size]
"""
CODE = """\
from penstock import Tensor
def both(text: str, content: bytes) -> tuple[str, str]:
    return text.upper(), str(len(content))
"""


@pytest.fixture
def scores(tmp_path: Path) -> Iterator[Pipeline]:
    with Pipeline.open(scores_bundle(tmp_path)) as pipeline:
        yield pipeline


@pytest.fixture
def texts(tmp_path: Path) -> Iterator[Pipeline]:
    (tmp_path / "my.py").write_text(CODE)
    with Pipeline.open(scores_bundle(tmp_path, TEXTS, allow_python=True), allow_python=True) as pipeline:
        yield pipeline


def same(one: dict[str, object], two: dict[str, object]) -> bool:
    return one["label"] == two["label"] and np.array_equal(one["p"], two["p"])  # type: ignore[arg-type]


def test_all_ways_give_the_same_answers(scores: Pipeline) -> None:
    called = [scores(item) for item in ITEMS]
    assert len({answer["label"][0] for answer in called}) == 2
    ways = {
        "by name": [scores(features=item) for item in ITEMS],
        "infer": [scores.infer({"features": item}) for item in ITEMS],
        "async": asyncio.run(_all(scores)),
        "batch": scores.batch(ITEMS),
        "stream": list(scores.stream({"features": item} for item in ITEMS)),
    }
    with ThreadPoolExecutor(8) as pool:
        ways["threads"] = list(pool.map(scores, ITEMS))
    for way, answers in ways.items():
        assert all(map(same, answers, called)), way


async def _all(scores: Pipeline) -> list[dict[str, object]]:
    return list(await asyncio.gather(*(scores.arun(item) for item in ITEMS)))


def test_types_and_facts(scores: Pipeline) -> None:
    assert (scores.name, list(scores.inputs), list(scores.outputs)) == ("scores", ["features"], ["label", "p"])
    assert scores.manifest.schema_version == 5
    plain = scores.to_json(scores(FEATURES))
    assert plain["label"] in (["no"], ["yes"])
    assert plain["p"] == pytest.approx(scores(FEATURES)["p"].tolist())


def test_an_item_that_fails_ends_the_batch_but_not_a_tolerant_stream(scores: Pipeline) -> None:
    items = [ITEMS[0], np.zeros(4, np.float32), "text", ITEMS[1]]
    with pytest.raises(InvalidArgument, match="item 1: unexpected shape"):
        scores.batch(items)
    with pytest.raises(InvalidArgument, match="the items are one str"):
        scores.batch("text")
    told = list(scores.stream(items, keep_errors=True))
    assert [isinstance(one, PenstockError) for one in told] == [False, True, True, False]
    assert same(told[3], scores(ITEMS[1]))


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_stream_reads_only_a_few_items_ahead(scores: Pipeline, is_readable: bool) -> None:
    read = 0

    def items() -> Iterator[np.ndarray | str]:
        nonlocal read
        while True:
            read += 1
            yield ITEMS[read % 20] if is_readable else "text"

    stream = scores.stream(items(), keep_errors=True)
    for _ in range(3):
        next(stream)
    assert read < 500
    stream.close()
    assert threading.active_count() < 50


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        ((), {}, "input 'features' is missing"),
        ((FEATURES, FEATURES), {}, "2 inputs are given, but there are 1"),
        ((FEATURES,), {"features": FEATURES}, "input 'features' is given twice"),
        ((FEATURES,), {"feature": FEATURES}, "unexpected input 'feature'"),
        (([1, 2, 3],), {}, "must be an array, not list"),
    ],
)
def test_wrong_calls(scores: Pipeline, given: tuple[object, ...], named: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        scores(*given, **named)


def test_paths_and_texts(texts: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"12345")
    (tmp_path / "a.txt").write_text("from a file")
    assert texts("a.txt", str(tmp_path / "a.bin")) == {"length": "A.TXT", "size": "5"}
    assert texts(tmp_path / "a.txt", b"1") == {"length": "FROM A FILE", "size": "1"}
    (answer,) = texts.batch([{"text": "", "content": tmp_path / "a.bin"}])
    assert answer == {"length": "", "size": "5"}
    with pytest.raises(NotFound, match=r"no file '.*none.bin'"):
        texts("x", tmp_path / "none.bin")
    with pytest.raises(InvalidArgument, match="cannot read"):
        texts("x", tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="is not UTF-8"):
        texts(tmp_path / "b.txt", b"")
    with pytest.raises(InvalidArgument, match="an item needs the inputs text, content"):
        texts.batch(["x"])


def test_a_closed_pipeline_is_refused(tmp_path: Path) -> None:
    scores = Pipeline.open(scores_bundle(tmp_path))
    scores.close()
    scores.close()
    for call in (
        lambda: scores(FEATURES),
        lambda: scores.batch([FEATURES]),
        lambda: asyncio.run(scores.arun(FEATURES)),
    ):
        with pytest.raises(Unavailable, match="pipeline 'scores' is closed"):
            call()


def test_closing_waits_for_the_calls_in_progress(scores: Pipeline) -> None:
    stream = scores.stream(iter(ITEMS))
    next(stream)
    closing = threading.Thread(target=scores.close)
    closing.start()
    answers = list(stream)
    closing.join(30)
    assert len(answers) == len(ITEMS) - 1
    assert not closing.is_alive()


def test_limits_of_devices(tmp_path: Path) -> None:
    path = scores_bundle(tmp_path)
    with pytest.raises(
        ResourceExhausted, match=r"model 'linear' would raise the estimated memory .* max_memory is 1,000 bytes"
    ):
        penstock.open(path, max_memory=1000)
    with penstock.open(path, threads=1, power_saving=True, max_memory=1 << 30) as scores:
        assert same(scores(FEATURES), scores.batch([FEATURES])[0])


def test_optional_outputs_may_be_absent(tmp_path: Path) -> None:
    text = SCORES.replace("k: 1", "k: 1\n    when: limit > 0").replace(
        "outputs:", "constants: {limit: 0}\noptional: [label]\noutputs:"
    )
    with Pipeline.open(scores_bundle(tmp_path, text)) as scores:
        assert list(scores(FEATURES)) == ["p"]


def test_large_files_pipes_and_devices_are_refused(
    texts: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InvalidArgument, match=f"'{path}' is a pipe or a device, not a file"):
            texts("a", path)
    with pytest.raises(InvalidArgument, match="Is a directory"):
        texts("a", tmp_path)
    monkeypatch.setattr("penstock.runtime.pipeline.MAX_FILE_BYTES", 3 << 20)
    (tmp_path / "large").write_bytes(bytes((3 << 20) + 1))
    with pytest.raises(InvalidArgument, match=f"large' has more than {3 << 20} bytes"):
        texts("a", tmp_path / "large")
    (tmp_path / "just").write_bytes(bytes(3 << 20))
    assert texts("a", tmp_path / "just")["size"] == str(3 << 20)


def test_closing_ends_a_stream_that_is_left_half_consumed(tmp_path: Path) -> None:
    taken = 0

    def endless() -> Iterator[np.ndarray]:
        nonlocal taken
        while True:
            taken += 1
            yield ITEMS[0]

    with Pipeline.open(scores_bundle(tmp_path)) as pipeline:
        stream = pipeline.stream(endless())
        next(stream)
    before = taken
    with pytest.raises(Unavailable, match="is closed"):
        next(stream)
    assert taken == before
    assert not [one.name for one in threading.enumerate() if one.name.startswith("penstock-worker")]


def test_the_items_of_a_stream_cannot_close_its_pipeline(scores: Pipeline) -> None:
    def items() -> Iterator[np.ndarray]:
        yield ITEMS[0]
        scores.close()

    with pytest.raises(InvalidArgument, match="cannot be closed while this thread takes an item of its stream"):
        scores.batch(items())
    assert len(scores.batch(ITEMS[:3])) == 3
