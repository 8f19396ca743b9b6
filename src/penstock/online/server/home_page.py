"""The server's page for people: its models with a request to try each of them, and links. Pure, static and without scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from math import prod
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.errors import shortened
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.state import Row, VersionPhase
from penstock.tensor import DataType, TensorSpec
from penstock.web_page import STYLE, document, policy

MOST_MODELS = 25
"""Number of models that the page shows in full."""
_SHORT = 64
"""An example with at most this number of elements is written out. A longer one is made by a program."""
_LONG = 1 << 20
"""An example has at most this number of elements."""
_KEY = "-H 'Authorization: Bearer KEY'"
_HALVES = (DataType.FP16, DataType.BF16)

_STYLE = """
nav{margin:.6rem 0} nav a{margin-right:1.2rem} .headline{font-size:1.6rem;font-weight:700;margin:.2rem 0}
.state{font-size:.8125rem;border:1px solid;border-radius:.25rem;padding:0 .35em;margin-left:.4em;font-weight:400}
.READY{color:var(--good)} .UNAVAILABLE{color:var(--bad)} .LOADING,.UNLOADING{color:var(--warn)}
table{max-width:40rem} table td,table th{text-align:left}
textarea{width:100%;font:.875rem ui-monospace,monospace;min-height:3rem;padding:.4rem}
textarea,button{color:inherit;background:var(--card);border:1px solid var(--line);border-radius:.3rem}
button{font:inherit;padding:.35rem .9rem;cursor:pointer} label{display:block;margin:.5rem 0} summary{cursor:pointer}
"""


class HomePage(msgspec.Struct, frozen=True):
    """The content of the page, limited to what the client may see."""

    address: str
    """URL of the server, as the client reached it, e.g. ``http://localhost:8000``."""
    rows: Sequence[Row] | None
    """Rows of the repository index; None if the client may not list the models."""
    configs: Mapping[str, ModelConfig]
    """The configurations of served models, by name."""
    metrics: str = ""
    """URL of the metrics; empty if there are none for this client."""
    needs_key: bool = False
    """True if requests must have a key."""
    forms: bool = False
    """True if forms can send requests: they need no key, and the server accepts TorchServe's requests."""


def body(home: HomePage) -> Iterator[str]:
    """The pieces of the page. Each takes little time, so that the event loop can answer requests in between."""
    yield "<h1>Penstock</h1>"
    yield from _locked(home) if home.rows is None else _models(home, home.rows)


def whole(home: HomePage, pieces: Sequence[str]) -> tuple[bytes, bytes]:
    """The page of all ``pieces`` of its body, and the lines of its headers."""
    target = "'self'" if home.forms else "'none'"
    page = document("Penstock", pieces, (_STYLE,), form_action=target)
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy((STYLE, _STYLE), form_action=target, frame_ancestors="'none'"),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        # Stricter values would hide the page's origin from the server, which then rejects the form.
        "Referrer-Policy": "same-origin",
        "Cache-Control": "no-store",
        "Vary": "Accept, Authorization, X-API-Key",
    }
    return page.encode(errors="replace"), "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()


def _links(home: HomePage) -> str:
    targets = [("Health", "/v2/health/ready"), ("API description (OpenAPI)", "/openapi.json")]
    targets += [("Metrics", home.metrics)] if home.metrics else []
    links = "".join(f'<a href="{escape(url)}">{name}</a>' for name, url in targets)
    return f"<nav>{links}</nav>"


def _locked(home: HomePage) -> Iterator[str]:
    command = f"curl -s -X POST {_KEY} {shlex.quote(home.address + '/v2/repository/index')}"
    yield '<p class="headline">This server is running</p>'
    yield _links(home)
    yield "<p>It shows its models only to clients that have access. To list them, send your key:</p>"
    yield f"<pre>{escape(command)}</pre>"


def _models(home: HomePage, rows: Sequence[Row]) -> Iterator[str]:
    found = [(name, list(versions)) for name, versions in groupby(rows, lambda row: str(row["name"]))]
    ready = sum(any(_state(row) == VersionPhase.READY.value for row in versions) for _, versions in found)
    yield f'<p class="headline">{ready} of {len(found)} model{"s" if len(found) != 1 else ""} ready</p>'
    yield "<p>This server answers requests of the Open Inference Protocol (KServe v2) over HTTP and gRPC.</p>"
    yield _links(home)
    if not found:
        yield "<p>The server has no models. Start it with a bundle, a model file or a model repository.</p>"
    for name, versions in found[:MOST_MODELS]:
        yield f"<section><h2>{escape(shortened(name))} {''.join(map(_badge, versions))}</h2>"
        yield from (f"<p>{escape(str(row['reason']))}</p>" for row in versions if row.get("reason"))
        if (config := home.configs.get(name)) is not None:
            yield from _try(home, config)
        yield "</section>"
    if len(found) > MOST_MODELS:
        key = f" {_KEY}" if home.needs_key else ""
        more = f"curl -s -X POST{key} {shlex.quote(home.address + '/v2/repository/index')}"
        yield f"<p>{len(found) - MOST_MODELS} more models are not shown. To list all of them:</p><pre>{escape(more)}</pre>"


def _badge(row: Row) -> str:
    state, version = _state(row), row.get("version", "")
    words = " ".join(filter(None, (f"version {version}" if version else "", state.lower() or "not loaded")))
    return f'<span class="state {escape(state)}">{escape(words)}</span>'


def _state(row: Row) -> str:
    return str(row.get("state", ""))


def _try(home: HomePage, config: ModelConfig) -> Iterator[str]:
    """The tensors of a served model, a command that sends it a request, and a form."""
    signature = config.client_signature
    tensors = [("input", one) for one in signature.inputs] + [("output", one) for one in signature.outputs]
    lines = "".join(
        f"<tr><td>{kind}</td><td>{escape(one.name)}</td><td>{one.datatype.value}</td><td>{escape(_shape(one))}</td></tr>"
        for kind, one in tensors[:_SHORT]
    )
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("tensor", "name", "type", "shape"))
    yield f"<table><tr>{heads}</tr>{lines}</table>"
    inputs = required_inputs(config)
    command = example(home.address, config, home.needs_key)
    if not command:
        yield "<p>An example in JSON is not possible for these inputs. Use a client library, such as tritonclient.</p>"
        return
    sizes = ", and each free dimension has size 1" if any(-1 in one.shape for one in inputs) else ""
    yield f"<p>To send a request, run this command. The values are placeholders{sizes}.</p><pre>{escape(command)}</pre>"
    is_plain = not config.decoupled and config.sequence_batching is None
    if home.forms and is_plain and sum(map(_count, inputs)) <= _SHORT:
        yield _form(config.name, inputs)


def required_inputs(config: ModelConfig) -> list[TensorSpec]:
    """The inputs that every request has."""
    given = zip(config.input, config.client_signature.inputs, strict=True)
    return [spec for tensor, spec in given if not tensor.optional]


def example(address: str, config: ModelConfig, needs_key: bool = False) -> str:
    """A shell command that sends the model a request; empty if JSON cannot express the inputs, or if they are too large."""
    inputs = required_inputs(config)
    count = sum(map(_count, inputs))
    if count > _LONG or len(inputs) > _SHORT or any(one.datatype in _HALVES for one in inputs):
        return ""
    url = f"{address}/v2/models/{quote(config.name, safe='')}"
    curl = f"curl -s{' ' + _KEY if needs_key else ''}"
    if config.decoupled:
        if count > _SHORT:
            return ""
        body = json.dumps({one.name: _nested(one) for one in inputs})
        return f"{curl} -N {shlex.quote(url + '/generate_stream')} -d {shlex.quote(body)}"
    parameters = {"sequence_id": 1, "sequence_start": True, "sequence_end": True} if config.sequence_batching else {}
    request = {"parameters": parameters} if parameters else {}
    tensors = [{"name": one.name, "datatype": one.datatype.value, "shape": _sizes(one)} for one in inputs]
    target = shlex.quote(url + "/infer")
    if count <= _SHORT:
        whole = [{**tensor, "data": [_value(one)] * _count(one)} for tensor, one in zip(tensors, inputs, strict=True)]
        return f"{curl} {target} -d {shlex.quote(json.dumps({**request, 'inputs': whole}))}"
    # JSON texts and lists of numbers are valid Python.
    parts = [
        f'{json.dumps(tensor)[:-1]}, "data": [{_value(one)!r}] * {_count(one)}}}'
        for tensor, one in zip(tensors, inputs, strict=True)
    ]
    members = "".join(f"{json.dumps(name)}: {value!r}, " for name, value in request.items())
    program = f'import json; print(json.dumps({{{members}"inputs": [{", ".join(parts)}]}}))'
    return f"python3 -c {shlex.quote(program)} | {curl} {target} -d @-"


def _form(name: str, inputs: Sequence[TensorSpec]) -> str:
    """A form that sends its fields as TorchServe's clients do."""
    fields = "".join(
        f'<label>{escape(one.name)}<textarea name="{escape(one.name)}" spellcheck="false">{escape(json.dumps(_nested(one)))}'
        "</textarea></label>"
        for one in inputs
    )
    target = f'action="/predictions/{escape(quote(name, safe=""))}" method="post" enctype="multipart/form-data"'
    return f'<details><summary>Try it here</summary><form {target}>{fields}<button type="submit">Send</button></form></details>'


def _sizes(spec: TensorSpec) -> list[int]:
    return [1 if size < 0 else size for size in spec.shape]


def _count(spec: TensorSpec) -> int:
    return prod(_sizes(spec))


def _value(spec: TensorSpec) -> Any:
    """A placeholder for an element."""
    return {DataType.BYTES: "text", DataType.BOOL: False}.get(spec.datatype, 0)


def _nested(spec: TensorSpec) -> Any:
    """The example of ``spec`` as nested lists."""
    value = _value(spec)
    for size in reversed(_sizes(spec)):
        value = [value] * size
    return value


def _shape(spec: TensorSpec) -> str:
    return " × ".join("any" if size < 0 else str(size) for size in spec.shape) or "scalar"
