"""Pages of other sites in a real browser: they cannot load models, infer or read responses. Pages of ``--allow-origin`` can."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

import models
from browsers import PATIENCE_S, Browser, Site
from http_servers import Client, get
from processes import ServerProcess

pytestmark = pytest.mark.real

PAGE = """<!doctype html><title>page</title><body><script>
const ask = new URLSearchParams(location.search), target = ask.get("target");
const seen = {};
const url = (name, path) => `${target}${path}?attack=${name}`;
const loadUrl = name => url(name, `/v2/repository/models/${name}/load`);
const code = name => btoa(`open(${JSON.stringify(ask.get("folder") + "/" + name)}, "w").close()\\nraise SystemExit`);
const loading = name => ({parameters: {config: '{"backend": "python"}', "file:1/model.py": code(name)}});
const body = name => JSON.stringify(loading(name));
const inputs = JSON.stringify({inputs: [{name: "x", shape: [1, 3], datatype: "FP32", data: [1, 2, 3]}]});
const read = promise => promise.then(async answer => [answer.type, answer.status, await answer.text()], () => ["error"]);
const once = (node, name, ...events) => new Promise(done => events.forEach(each => node.addEventListener(each, () => done([each]))));
const add = (tag, fields) => document.body.appendChild(Object.assign(document.createElement(tag), fields));
const post = (name, more) => read(fetch(loadUrl(name), {method: "POST", body: body(name), ...more}));
const inFrame = (name, fields) => {
  const script = `fetch(${JSON.stringify(loadUrl(name))}, {method: "POST", mode: "no-cors", body: ${JSON.stringify(body(name))}})
    .then(() => "opaque", () => "error").then(end => parent.postMessage(["${name}", end], "*"))`;
  const text = "<script>" + script + "</" + "script>";
  const end = new Promise(done => addEventListener("message", event => event.data[0] === name && done([event.data[1]])));
  add("iframe", fields(text));
  return end;
};
const attacks = {
  cors: name => post(name),
  nocors: name => post(name, {mode: "no-cors"}),
  json: name => post(name, {headers: {"Content-Type": "application/json"}}),
  keyed: name => post(name, {headers: {"Authorization": "Bearer a-key"}}),
  xhr: name => {
    const request = new XMLHttpRequest();
    request.open("POST", loadUrl(name));
    request.send(body(name));
    return once(request, name, "load", "error");
  },
  beacon: async name => [navigator.sendBeacon(loadUrl(name), body(name))],
  form: name => {
    const frame = add("iframe", {name: "of_form"});
    const form = add("form", {action: loadUrl(name), method: "post", enctype: "text/plain", target: "of_form"});
    const text = JSON.stringify({...loading(name), end: "|"}).split("|");
    form.append(Object.assign(document.createElement("input"), {name: text[0], value: text[1]}));
    const end = once(frame, name, "load", "error");
    form.submit();
    return end;
  },
  sandbox: name => inFrame(name, text => ({sandbox: "allow-scripts", srcdoc: text})),
  data: name => inFrame(name, text => ({src: "data:text/html," + encodeURIComponent(text)})),
  infer: name => read(fetch(url(name, "/v2/models/first/infer"), {method: "POST", body: inputs})),
  blindinfer: name => read(fetch(url(name, "/v2/models/first/infer"), {method: "POST", mode: "no-cors", body: inputs})),
  read: name => read(fetch(url(name, "/v2/models/first/config"))),
  image: name => once(add("img", {src: url(name, "/v2/models/first")}), name, "load", "error"),
  script: name => once(add("script", {src: url(name, "/v2/models/first")}), name, "load", "error"),
  events: name => once(new EventSource(url(name, "/v2/models/first/generate_stream")), name, "open", "error"),
  socket: name => once(new WebSocket(url(name, "/v2").replace("http", "ws")), name, "open", "error"),
};
const names = ask.get("only") ? ask.get("only").split(",") : Object.keys(attacks);
Promise.all(names.map(async name => seen[name] = await attacks[name](name)))
  .then(() => fetch("/report", {method: "POST", body: JSON.stringify(seen)}));
</script>"""
"""Attacks by name; the model ``<name>`` that an attack loads would write the file ``<name>``."""
LOADS = {"cors", "nocors", "json", "keyed", "xhr", "beacon", "form", "sandbox", "data"}
NAMES = LOADS | {"infer", "blindinfer", "read", "image", "script", "events", "socket"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the model ``first``."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "first/1").mkdir(parents=True)
    (folder / "first/1/model.onnx").write_bytes(models.linear().data)
    return folder


def serving(root: Path, *arguments: str) -> ServerProcess:
    explicit = ("--model-repository", str(root), "--model-control-mode", "explicit", "--load-model", "first")
    return ServerProcess(arguments=(*explicit, *arguments))


@pytest.fixture(scope="module", params=[(), ("--host", "0.0.0.0")], ids=["loopback", "exposed"])
def server(root: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """Every client may upload files, so that only the checks of pages protect the server."""
    with serving(root, "--allow-model-upload", *request.param) as server:
        yield server


def address(server: ServerProcess) -> tuple[str, int]:
    return "127.0.0.1", server.address[1]


def visit(site: Site, name: str, target: str, folder: Path, only: str = "") -> dict[str, Any]:
    """The results of the attacks by the page of ``site``, whose host is ``name`` in the browser."""
    marks = folder / "marks"
    marks.mkdir(exist_ok=True)
    url = f"http://{name}:{site.port}/page?target={target}&folder={marks}&only={only}"
    for attempt in range(3):  # a browser may hang on a loaded machine
        (start := folder / str(attempt)).mkdir()
        with Browser(start, url), suppress(Empty):
            report: dict[str, Any] = site.reports.get(timeout=PATIENCE_S)
            return report
    raise AssertionError("the page has reported nothing")


def test_a_page_of_another_site_achieves_nothing(server: ServerProcess, tmp_path: Path) -> None:
    with Site(address(server)) as target, Site(address(server), PAGE) as site:
        seen = visit(site, "127.0.0.1", f"http://localhost:{target.port}", tmp_path)
        answers = target.answers(NAMES)
    assert {status for statuses in answers.values() for _, status in statuses} == {403}
    assert seen.keys() == NAMES
    assert {tuple(each[:2]) for each in seen.values()} <= {("error",), ("opaque",), ("opaque", 0), ("load",), (True,)}
    is_untouched(server, tmp_path)


def test_a_rebound_page_achieves_nothing(server: ServerProcess, tmp_path: Path) -> None:
    """The page's site has become the server: requests are of the same origin, and ``Host`` is the site's name."""
    with Site(address(server), PAGE) as site:
        seen = visit(site, "evil.example", f"http://evil.example:{site.port}", tmp_path)
        answers = site.answers(NAMES)
    assert {status for statuses in answers.values() for _, status in statuses} == {403}
    assert seen["read"][:2] == ["basic", 403]
    is_untouched(server, tmp_path)


def is_untouched(server: ServerProcess, folder: Path) -> None:
    with Client(address(server)) as client:
        statistics = json.loads(client.ask(get("/v2/models/stats")).body)["model_stats"]
    assert [(each["name"], each["inference_count"]) for each in statistics] == [("first", 0)]
    assert not list((folder / "marks").iterdir())


def test_the_page_that_is_allowed_works_and_others_do_not(root: Path, tmp_path: Path) -> None:
    page = PAGE.replace("answer.type", 'answer.headers.get("content-length")')
    with Site(None, page) as site:
        allowed = f"http://app.example:{site.port}"
        with (
            serving(root, "--allow-model-upload", "--allow-origin", allowed) as server,
            Site(address(server)) as target,
        ):
            url = f"http://localhost:{target.port}"
            seen = visit(site, "app.example", url, tmp_path)
            answers = target.answers(NAMES)
            marks = {each.name for each in (tmp_path / "marks").iterdir()}
            assert marks == LOADS - {"sandbox", "data"}, "the attacks work where nothing prevents them"
            assert answers["keyed"][0] == ("OPTIONS", 200)
            assert set(answers["infer"]) == {("POST", 200)}
            length, status, body = seen["infer"]
            assert (status, json.loads(body)["model_name"]) == (200, "first")
            assert int(length) == len(body), "headers can be read"
            assert {each[1] for name in ("sandbox", "data") for each in answers[name]} == {403}
            (tmp_path / "other").mkdir()
            seen = visit(site, "other.example", url, tmp_path / "other", "infer,json")
            assert seen == {"infer": ["error"], "json": ["error"]}
            assert not list((tmp_path / "other/marks").iterdir())
