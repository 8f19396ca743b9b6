import json
import re
import subprocess
from html import unescape
from pathlib import Path

import pytest

from http_servers import GatedServer, get, infer, post
from penstock.clock import ManualClock
from penstock.online.server.access.auth import Access
from penstock.online.server.access.web import WebAccess
from penstock.online.server.http.resources import merge
from penstock.online.server.http.routes import Resource, Route
from penstock.testing import DOUBLER, FakeModel, double
from real import require

HTML = "Accept: text/html,application/xhtml+xml,*/*;q=0.8\r\n"


def one(exchange: object, route: Route) -> None:
    """Handles nothing."""


def other(exchange: object, route: Route) -> None:
    """Handles nothing."""


def test_dialects_share_resources_and_verbs_come_first() -> None:
    first = [Resource("/v1/{model}", {b"GET": one}), Resource("/", {b"GET": one})]
    second = [Resource("/v1/{model}:predict", {b"POST": one}), Resource("/", {b"GET": other, b"OPTIONS": other})]
    found = merge([first, second])
    assert [resource.path for resource in found] == ["/v1/{model}:predict", "/v1/{model}", "/"]
    assert found[2].handlers == {b"GET": one, b"OPTIONS": other}


def test_dialects_that_are_not_named_are_not_there() -> None:
    with GatedServer(dialects=("kserve-v1",)) as server:
        client = server.connect()
        assert client.ask(get("/v1/models/m")).status == 200
        assert client.ask(get("/ping")).status == 404
        assert client.ask(get("/v2/models/m")).status == 200


def test_a_browser_gets_a_page_and_every_other_client_what_it_got() -> None:
    with GatedServer() as server:
        client = server.connect()
        page = client.ask(get("/", HTML))
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert b"1 of 1 model ready" in page.body
        for accept in ("", "Accept: */*\r\n", "Accept: application/json\r\n", "Accept: text/html;q=0.1, */*\r\n"):
            answer = client.ask(get("/", accept))
            assert json.loads(answer.body) == {"status": "alive"}
            assert answer.headers.keys() == {"content-type", "content-length"}
        assert client.ask(infer(21)).data == [42, 0]
    with GatedServer(dialects=()) as server:
        client = server.connect()
        assert client.ask(get("/")).status == 404
        assert client.ask(get("/", HTML)).status == 200


def test_head_of_the_page_has_no_body() -> None:
    with GatedServer() as server:
        client = server.connect()
        client.send(get("/", HTML, method="HEAD"))
        assert b"text/html" in client.read_head()
        assert client.ask(infer(21)).data == [42, 0]


def test_the_page_shows_what_the_key_gives_access_to(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[clients.bob]\nkey = "bob-bob-bob-bob-bob"\nmodels = ["m"]\n[clients.root]\nkey = "root-root-root-root"\n'
    )
    with GatedServer(also={"hidden": FakeModel(DOUBLER, double)}, access=Access(keys, ManualClock())) as server:
        client = server.connect()
        seen = {
            key: client.ask(get("/", f"{HTML}X-API-Key: {key}\r\n" if key else HTML)).body
            for key in ("", "unknown-unknown-unknown", "bob-bob-bob-bob-bob", "root-root-root-root")
        }
        locked, unknown, bob, root = seen.values()
        assert locked == unknown
        assert b"only to clients that have access" in locked
        for word in (b"hidden", b"infer", b"1.0", b"FP32"):
            assert word not in locked, word
        assert b"/v2/models/m/infer" in bob
        assert b"hidden" not in bob
        assert b"/v2/models/hidden/infer" in root
        assert b"<form" not in bob + root


@pytest.mark.parametrize("group", ["model-repository", "metadata"])
def test_the_page_obeys_restrictions(group: str) -> None:
    with GatedServer(dialects=(), http_restricted_api=(f"{group}:x-key=v",)) as server:
        client = server.connect()
        assert b"/v2/models/m" not in client.ask(get("/", HTML)).body
        assert b"/v2/models/m/infer" in client.ask(get("/", HTML + "X-Key: v\r\n")).body


def test_another_sites_page_cannot_read_it() -> None:
    with GatedServer(web=WebAccess((), ("127.0.0.1",))) as server:
        client = server.connect()
        rebound = get("/", HTML).replace(b"localhost", b"evil.example")
        assert client.ask(rebound).status == 403
        client = server.connect()
        foreign = "Origin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: cors\r\n"
        assert client.ask(get("/", HTML + foreign)).status == 403
        client = server.connect()
        followed = "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\n"
        assert client.ask(get("/", HTML + followed)).status == 200, "a user follows a link"


def test_the_metrics_link_is_one_that_works() -> None:
    def link(host: str = "localhost", **config: object) -> bytes:
        with GatedServer(**config) as server:
            body = server.connect().ask(get("/", HTML).replace(b"localhost", host.encode())).body
        found = re.search(rb'href="([^"]*)">Metrics', body)
        return found[1] if found else b""

    assert link() == b"/monitoring/prometheus/metrics"
    assert link(allow_metrics=False) == b""
    assert link(dialects=(), metrics_port=8002) == b"http://localhost:8002/metrics"
    assert link("[::1]:8000", dialects=(), metrics_port=8002) == b"http://[::1]:8002/metrics"
    assert link(dialects=(), metrics_port=8002, metrics_host="10.0.0.1") == b""
    assert link(dialects=()) == b"", "any free port"


def test_the_form_sends_what_the_server_reads() -> None:
    with GatedServer() as server:
        client = server.connect()
        page = client.ask(get("/", HTML)).body.decode()
        form = re.search(r'<form action="(.*?)".*?<textarea name="(.*?)".*?>(.*?)</textarea>', page)
        assert form is not None
        path, name, value = map(unescape, form.groups())
        body = f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n--b--\r\n'.encode()
        answer = client.ask(post(body, "Content-Type: multipart/form-data; boundary=b\r\n", path))
        assert (answer.status, json.loads(answer.body)) == (200, [[0, 0]])


@pytest.mark.real
def test_the_command_of_the_page_works_in_a_shell() -> None:
    require("curl")
    with GatedServer() as server:
        host = "{}:{}".format(*server.address)
        page = server.connect().ask(get("/", HTML).replace(b"localhost", host.encode())).body.decode()
        found = re.search(r"<pre>(curl .*?)</pre>", page, re.DOTALL)
        assert found is not None
        done = subprocess.run(["sh", "-c", unescape(found[1])], capture_output=True, check=True)
    assert json.loads(done.stdout)["outputs"][0]["data"] == [0, 0]
