from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.online.repository.config import ModelConfig, SequenceBatching, TensorConfig
from penstock.online.repository.state import Row
from penstock.online.server.home_page import MOST_MODELS, HomePage, body, example, required_inputs, whole
from penstock.tensor import DataType

ADDRESS = "http://localhost:8000"
EVIL = """a'b"c`d$(e)\\f<script>alert(1)</script>&;g|h #"""
Tensors = list[tuple[str, DataType, tuple[int, ...]]]
X: Tensors = [("x", DataType.FP32, (2,))]


def model(inputs: Tensors = X, name: str = "m", **changes: Any) -> ModelConfig:
    given = tuple(TensorConfig(*one) for one in inputs)
    whole = ModelConfig(name, max_batch_size=8, input=given, output=(TensorConfig("y", DataType.FP32, (3,)),))
    return msgspec.structs.replace(whole, **changes)


def row(name: str = "m", state: str = "READY", version: str = "1", reason: str = "") -> Row:
    return {"name": name, "version": version, "state": state, "reason": reason}


def page(*configs: ModelConfig, **changes: Any) -> str:
    home = HomePage(ADDRESS, [row(one.name) for one in configs], {one.name: one for one in configs})
    home = msgspec.structs.replace(home, **changes)
    return whole(home, list(body(home)))[0].decode()


class Tags(HTMLParser):
    """Tags and attributes of a page, after a check that its tags are nested correctly."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] != ["style"] else ""


def test_models_with_their_versions_states_and_tensors() -> None:
    rows = [row(version="1"), row(version="2", state="LOADING"), row("broken", "UNAVAILABLE", reason="no such file")]
    text = Tags(page(model(), rows=[*rows, {"name": "idle"}])).text
    assert "1 of 3 models ready" in text
    for fact in ("version 1 ready", "version 2 loading", "version 1 unavailable", "no such file", "idle not loaded"):
        assert fact in text, fact
    assert "inputxFP32any × 2" in text
    assert "outputyFP32any × 3" in text


def test_a_server_without_models_says_so() -> None:
    assert "The server has no models." in page()


def test_a_client_that_may_not_list_sees_no_model() -> None:
    shown = page(model(name="secret"), rows=None, metrics="")
    assert "secret" not in shown
    assert "only to clients that have access" in shown
    assert "Authorization: Bearer KEY" in shown


def test_links() -> None:
    def links(**changes: Any) -> list[str | None]:
        return [fields["href"] for tag, fields in Tags(page(**changes)).found if tag == "a"]

    assert links() == ["/v2/health/ready", "/openapi.json"]
    assert links(metrics="http://h:8002/metrics")[-1] == "http://h:8002/metrics"


def test_the_headers_forbid_everything_but_the_style_and_perhaps_the_form() -> None:
    for forms, target in ((False, "'none'"), (True, "'self'")):
        _, lines = whole(HomePage(ADDRESS, [], {}, forms=forms), [])
        headers = dict(line.split(": ", 1) for line in lines.decode().split("\r\n") if line)
        rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
        assert rules["default-src"] == rules["script-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
        assert rules["form-action"] == target
        assert all(word.startswith("'sha256-") for word in rules["style-src"].split())
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Accept" in headers["Vary"]


@given(st.text(min_size=1), st.text(max_size=20))
def test_names_and_reasons_are_text(name: str, word: str) -> None:
    evil = EVIL + word
    config = model([(evil, DataType.INT64, (1,))], EVIL + name)
    rows = [row(config.name, reason=evil), row("other", reason=evil)]
    tags = Tags(page(config, rows=rows, forms=True, address=f"http://{evil}"))
    frame = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "nav", "a", "section", "span", "pre"}
    parts = {"table", "tr", "th", "td", "details", "summary", "form", "label", "textarea", "button"}
    assert {tag for tag, _ in tags.found} <= frame | parts
    assert not [
        name for _, fields in tags.found for name in fields if name.startswith("on") or name in ("src", "style")
    ]


def test_only_some_models_are_shown_in_full() -> None:
    many = [model(name=f"m{number}") for number in range(MOST_MODELS + 3)]
    shown = page(*many)
    assert shown.count("<section>") == MOST_MODELS
    assert "3 more models are not shown" in shown


def sent(command: str, folder: Path) -> tuple[list[str], str]:
    """The arguments that a shell gives to curl for ``command``, and what it reads from stdin."""
    (folder / "curl").write_text('#!/bin/sh\nfor one; do printf "%s\\0" "$one"; done\nexec cat\n')
    (folder / "curl").chmod(0o755)
    (folder / "python3").unlink(missing_ok=True)
    (folder / "python3").symlink_to(sys.executable)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", command], env=path, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True
    )
    *arguments, read = done.stdout.split("\0")
    return arguments, read


@pytest.mark.parametrize("size", [2, 1000], ids=["small", "large"])
@pytest.mark.parametrize("name", ["m", EVIL, "a/b", "ü [1] {2}", "-x", "%2F"])
def test_the_example_is_a_request_for_the_model_whatever_its_names(name: str, size: int, tmp_path: Path) -> None:
    tensors = [(name, DataType.FP32, (-1, size)), ("b", DataType.BOOL, ()), ("t", DataType.BYTES, (2,))]
    command = example(ADDRESS, model(tensors, name))
    (_, url, _, data), read = sent(command, tmp_path)
    parts = urlsplit(url)
    assert (parts.netloc, [unquote(one) for one in parts.path.split("/")]) == (
        "localhost:8000",
        ["", "v2", "models", name, "infer"],
    )
    request = json.loads(read if data == "@-" else data)
    assert (data == "@-") == (size == 1000)
    assert request == {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [1, 1, size], "data": [0] * size},
            {"name": "b", "datatype": "BOOL", "shape": [1], "data": [False]},
            {"name": "t", "datatype": "BYTES", "shape": [1, 2], "data": ["text"] * 2},
        ]
    }


@pytest.mark.parametrize("size", [2, 1000])
def test_a_request_to_a_stateful_model_is_a_whole_sequence(size: int, tmp_path: Path) -> None:
    command = example(ADDRESS, model([("x", DataType.FP32, (size,))], sequence_batching=SequenceBatching()))
    arguments, read = sent(command, tmp_path)
    parameters = json.loads(read or arguments[-1])["parameters"]
    assert parameters == {"sequence_id": 1, "sequence_start": True, "sequence_end": True}


def test_a_decoupled_model_is_asked_for_a_stream(tmp_path: Path) -> None:
    arguments, _ = sent(example(ADDRESS, model(decoupled=True)), tmp_path)
    assert arguments == ["-s", "-N", f"{ADDRESS}/v2/models/m/generate_stream", "-d", '{"x": [[0, 0]]}']


@pytest.mark.parametrize(
    "config",
    [
        model([("x", DataType.FP16, (2,))]),
        model([("x", DataType.BF16, (2,))]),
        model([("x", DataType.FP32, (1 << 11, 1 << 11))]),
        model([("x", DataType.FP32, (1000,))], decoupled=True),
        model([(str(number), DataType.FP32, ()) for number in range(65)]),
    ],
    ids=["halves", "bfloats", "large", "a large stream", "many"],
)
def test_what_json_cannot_carry_has_no_example(config: ModelConfig) -> None:
    assert example(ADDRESS, config) == ""
    assert "Use a client library" in page(config)


@pytest.mark.parametrize("size", [2, 1000])
def test_a_server_with_keys_is_sent_one(size: int, tmp_path: Path) -> None:
    config = model([("x", DataType.FP32, (size,))])
    arguments, _ = sent(example(ADDRESS, config, needs_key=True), tmp_path)
    assert arguments[:3] == ["-s", "-H", "Authorization: Bearer KEY"]
    assert "Bearer KEY" in page(config, needs_key=True)
    assert "Bearer" not in page(config)


def test_optional_inputs_are_left_out() -> None:
    config = model([*X, ("z", DataType.FP32, (1,))])
    config = msgspec.structs.replace(
        config, input=(config.input[0], msgspec.structs.replace(config.input[1], optional=True))
    )
    assert [one.name for one in required_inputs(config)] == ["x"]
    assert '"z"' not in example(ADDRESS, config)


def test_an_invented_size_is_said() -> None:
    assert "each free dimension has size 1" in page(model())
    assert "free dimension" not in page(model(max_batch_size=0))


def test_a_form_is_there_if_it_can_work() -> None:
    small, large = model(), model([("x", DataType.FP32, (100,))])
    stateful, stream = model(sequence_batching=SequenceBatching()), model(decoupled=True)
    shown = page(small, forms=True)
    assert '<form action="/predictions/m" method="post" enctype="multipart/form-data">' in shown
    found = re.search(r'<textarea name="x" spellcheck="false">(.*?)</textarea>', shown)
    assert found is not None
    assert json.loads(unescape(found[1])) == [[0, 0]]
    for text in (page(small), *(page(one, forms=True) for one in (large, stateful, stream))):
        assert "<form" not in text


def test_the_page_is_made_in_pieces() -> None:
    large = model([(f"{'x' * 200}{number}", DataType.FP32, (1,)) for number in range(64)])
    configs = {f"m{number}": msgspec.structs.replace(large, name=f"m{number}") for number in range(MOST_MODELS)}
    home = HomePage(ADDRESS, [row(name) for name in configs], configs, forms=True)
    pieces = list(body(home))
    assert len(pieces) > 4 * MOST_MODELS
    assert max(map(len, pieces)) < 64 << 10
