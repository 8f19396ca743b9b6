"""The corpus in the repository: past findings do no harm any more, and it stays small."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.fuzz.campaign import TARGETS, replay
from tests.fuzz.corpus import FOLDER, Corpus

_MOST_BYTES = 500 << 10


@pytest.mark.parametrize("name", [name for name in TARGETS if Corpus(name).paths()])
def test_messages_of_the_corpus_do_no_harm(name: str) -> None:
    replay(name, Corpus(name).messages())


def test_the_corpus_is_small_and_in_order() -> None:
    paths = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in paths) < _MOST_BYTES
    for path in paths:
        assert path.parent.name in TARGETS, f"{path} belongs to no target"
        assert path.name.endswith(hashlib.sha256(path.read_bytes()).hexdigest()[:16]), f"{path} has another digest"


def test_findings_are_always_kept_and_other_messages_while_there_is_room(tmp_path: Path) -> None:
    corpus = Corpus("some", tmp_path)
    for number in range(100):
        corpus.offer(bytes((number,)))
    corpus.offer(bytes(100_000))
    assert len(corpus.paths()) == 24
    path = corpus.add_finding(bytes(100_000))
    assert path in corpus.paths()
    assert bytes(100_000) in corpus.messages()
