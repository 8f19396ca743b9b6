"""A real server as it starts by default: web pages cannot reach it, and clients cannot make it run their code."""

from __future__ import annotations

import base64
import hashlib
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

import models
from http_servers import Answer, Client
from processes import ServerProcess

EVIL, APP = "http://evil.example", "https://app.example"
KEY = "the key of an operator"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the model ``first``."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "first/1").mkdir(parents=True)
    (folder / "first/1/model.onnx").write_bytes(models.linear().data)
    return folder


def serving(root: Path, *arguments: str, **settings: object) -> ServerProcess:
    explicit = ("--model-repository", str(root), "--model-control-mode", "explicit", "--load-model", "first")
    return ServerProcess(arguments=(*explicit, *arguments), **settings)


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    """Started without any option."""
    with serving(root, unix_socket=str(root / "socket")) as server:
        yield server


@pytest.fixture(scope="module")
def open_server(root: Path) -> Iterator[ServerProcess]:
    """Started with the options that allow the page ``APP`` and uploads."""
    with serving(root, "--allow-origin", APP, "--allow-model-upload") as server:
        yield server


def port_of(server: ServerProcess, name: str) -> tuple[str, int]:
    """The address of a port in the ready line."""
    host, _, port = next(word for word in server.line.split() if word.startswith(name)).partition("=")[2].partition(":")
    return host, int(port)


def ask(address: tuple[str, int], head: str, body: bytes = b"") -> Answer:
    with Client(address) as client:
        client.send(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return client.read()


def attack(marker: Path) -> dict[str, Any]:
    """Parameters of a load whose code writes ``marker``."""
    code = f"open({str(marker)!r}, 'w').close()\nraise SystemExit"
    return {"config": '{"backend": "python"}', "file:1/model.py": base64.b64encode(code.encode()).decode()}


@pytest.mark.parametrize(
    "headers",
    [
        f"Host: localhost\r\nOrigin: {EVIL}\r\nContent-Type: text/plain",
        f"Host: localhost\r\nOrigin: {EVIL}\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors",
        "Host: localhost\r\nOrigin: null\r\nSec-Fetch-Site: cross-site",
        "Host: 127.0.0.1\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nContent-Type: application/x-www-form-urlencoded",
        "Host: localhost\r\nOrigin: http://localhost:3000\r\nSec-Fetch-Site: same-site",
        f"Host: evil.example\r\nOrigin: {EVIL}",
        "Host: evil.example\r\nSec-Fetch-Site: same-origin",
        f"Host: 0.0.0.0\r\nOrigin: {EVIL}",
    ],
    ids=["text", "no-cors", "sandbox", "form", "neighbour", "rebound", "rebound-get", "zero"],
)
@pytest.mark.parametrize("port", ["http", "grpc"])
def test_no_web_page_makes_the_server_run_code(
    server: ServerProcess, open_server: ServerProcess, tmp_path: Path, headers: str, port: str
) -> None:
    body = json.dumps({"parameters": attack(tmp_path / "ran")}).encode()
    for each in (server, open_server):
        answer = ask(port_of(each, port), f"POST /v2/repository/models/evil/load HTTP/1.1\r\n{headers}", body)
        assert (answer.status, "access-control-allow-origin" in answer.headers) == (403, False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("port", "path"),
    [
        ("http", "/v2"),
        ("http", "/metrics"),
        ("http", "/openapi.json"),
        ("http", "/v1/models/first"),
        ("http", "/ping"),
        ("metrics", "/metrics"),
    ],
)
def test_no_web_page_reads_anything(server: ServerProcess, port: str, path: str) -> None:
    for headers in (
        f"Host: localhost\r\nOrigin: {EVIL}",
        "Host: evil.example",
        "Host: localhost\r\nSec-Fetch-Site: cross-site",
    ):
        assert ask(port_of(server, port), f"GET {path} HTTP/1.1\r\n{headers}").status == 403
    assert ask(port_of(server, port), f"GET {path} HTTP/1.1\r\nHost: LOCALHOST:1\r\nSec-Fetch-Site: none").status != 403


def test_any_name_reaches_a_unix_socket_where_no_page_is(server: ServerProcess, root: Path) -> None:
    for headers, status in (("Host: d", b"200"), (f"Host: d\r\nOrigin: {EVIL}", b"403")):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(root / "socket"))
            client.sendall(f"GET /v2 HTTP/1.1\r\n{headers}\r\n\r\n".encode())
            assert client.recv(4096).startswith(b"HTTP/1.1 " + status)


def test_an_allowed_page_gets_preflights_answers_and_errors(open_server: ServerProcess) -> None:
    address = open_server.address
    page = f"Host: localhost\r\nOrigin: {APP}\r\nSec-Fetch-Site: cross-site"
    asked = f"{page}\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization"
    before = ask(address, f"OPTIONS /v2/models/first/infer HTTP/1.1\r\n{asked}")
    assert (before.status, before.body) == (200, b"")
    assert before.headers["access-control-allow-methods"] == "POST"
    assert before.headers["access-control-allow-headers"] == "*, Authorization"
    for path, status in (("/v2", 200), ("/v2/models/absent", 404), ("/nothing", 404), ("/v2/logging/x", 404)):
        answer = ask(address, f"GET {path} HTTP/1.1\r\n{page}")
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, APP)
        assert answer.headers["vary"] == "Origin"
    with Client(address) as client:
        client.send(f"POST /v2/models/m/infer HTTP/1.1\r\n{page}\r\nContent-Length: 9999999999\r\n\r\n".encode())
        answer = client.read()
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (413, APP)
    refused = ask(address, f"OPTIONS /v2 HTTP/1.1\r\n{asked.replace(APP, EVIL)}")
    assert (refused.status, "access-control-allow-origin" in refused.headers) == (403, False)
    assert "access-control-allow-origin" not in ask(address, "GET /v2 HTTP/1.1\r\nHost: localhost").headers


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /v2 HTTP/1.1", 400),
        ("GET /v2 HTTP/1.1\r\nHost: localhost\r\nHost: localhost", 400),
        ("GET /v2 HTTP/1.1\r\nHost: local host", 400),
        ("GET /v2 HTTP/1.0\r\nHost: localhost\r\nHost: localhost", 400),
        ("GET /v2 HTTP/1.0", 200),
        ("GET /v2 HTTP/1.1\r\nHost: localhost:8000", 200),
    ],
)
def test_a_request_names_the_server_once(server: ServerProcess, head: str, status: int) -> None:
    assert ask(server.address, head).status == status


def load(server: ServerProcess, protocol: str, name: str, headers: dict[str, str] | None = None) -> str:
    """Load a model from a client's file; the error's text, empty if it was loaded."""
    library: Any = over_http if protocol == "http" else over_grpc
    with library.InferenceServerClient("{}:{}".format(*server.address)) as client:
        try:
            client.load_model(name, headers, config="{}", files={"file:1/model.onnx": models.linear().data})
        except InferenceServerException as error:
            return f"{error.status()}: {error.message()}"
        return ""


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_uploaded_files_need_the_setting(server: ServerProcess, open_server: ServerProcess, protocol: str) -> None:
    refused = load(server, protocol, "m")
    assert refused.startswith({"http": "403: ", "grpc": "StatusCode.PERMISSION_DENIED: "}[protocol])
    assert "may not be loaded from files that a client sends (put the files into the repository" in refused
    assert load(open_server, protocol, "m") == ""
    library: Any = over_http if protocol == "http" else over_grpc
    with library.InferenceServerClient("{}:{}".format(*server.address)) as client:
        client.load_model("first", config='{"max_batch_size": 2}')
        client.unload_model("first")
        client.load_model("first")
        assert client.is_model_ready("first")


def test_a_file_that_is_not_base64_is_refused(open_server: ServerProcess) -> None:
    body = b'{"parameters":{"file:1/a":"?"}}'
    answer = ask(open_server.address, "POST /v2/repository/models/m/load HTTP/1.1\r\nHost: localhost", body)
    assert (answer.status, answer.error) == (400, "'file:1/a' is not base64")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_uploaded_files_need_an_admin_where_there_are_keys(root: Path, tmp_path: Path, protocol: str) -> None:
    keys = tmp_path / "keys.toml"
    digests = {name: hashlib.sha256(f"{KEY} {name}".encode()).hexdigest() for name in ("admin", "user")}
    keys.write_text(
        f'[clients.admin]\nkey_sha256 = "{digests["admin"]}"\nadmin = true\n[clients.user]\nkey_sha256 = "{digests["user"]}"\n'
    )
    with serving(root, keys_file=keys) as server:
        assert "may not control this server" in load(server, protocol, "m", {"authorization": f"Bearer {KEY} user"})
        assert load(server, protocol, "m", {"authorization": f"Bearer {KEY} admin"}) == ""
        answer = ask(server.address, "GET /v2/health/live HTTP/1.1\r\nHost: penstock.example")
        assert answer.status == 200, "with keys every name is accepted"


@pytest.mark.parametrize(("host", "is_warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_an_open_server_warns_once(root: Path, host: str, is_warned: bool) -> None:
    with serving(root, "--host", host) as server:
        server.signal(signal.SIGTERM)
        assert server.end()[1].count("may do everything: set 'keys_file'") == is_warned


def test_a_server_with_keys_warns_once_of_clear_text_and_of_open_metrics(root: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[clients.user]\nkey_sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\n')
    with serving(root, "--host", "0.0.0.0", keys_file=keys) as server:
        server.signal(signal.SIGTERM)
        log = server.end()[1]
    assert log.count("keys are sent to '0.0.0.0' in clear text") == 1
    assert log.count("the metrics port on '0.0.0.0' requires no key") == 1


def test_a_call_of_a_web_page_over_grpc_is_refused(server: ServerProcess) -> None:
    with over_grpc.InferenceServerClient("{}:{}".format(*port_of(server, "grpc"))) as client:
        assert client.is_server_live(headers={"origin": f"http://{'{}:{}'.format(*port_of(server, 'grpc'))}"})
        for headers in ({"origin": EVIL}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}):
            with pytest.raises(InferenceServerException, match="may not use this server") as caught:
                client.is_server_live(headers=headers)
            assert caught.value.status() == "StatusCode.PERMISSION_DENIED"


def test_a_restriction_holds_on_every_port_that_speaks_http(root: Path) -> None:
    restriction = 'http_restricted_api=["model-repository,metadata:x-admin=secret"]'
    with serving(root, "--set", restriction, "--set", "dialects=[]") as server:
        for address in (port_of(server, "http"), port_of(server, "grpc")):
            for path in ("/v2", "/v2?x=1", "/v2/models/first", "/v2/models/first/versions/1", "/v2/models/%66irst"):
                head = f"GET {path} HTTP/1.1\r\nHost: localhost"
                assert ask(address, head).status == 403
                assert ask(address, f"{head}\r\nX-Admin: wrong").status == 403
                assert ask(address, f"{head}\r\nX-ADMIN: secret").status == 200
            load_model = "POST /v2/repository/{}models/first/load HTTP/1.1\r\nHost: localhost"
            assert [ask(address, load_model.format(any)).status for any in ("", "any/")] == [403, 403]
