"""The effects of ``penstock serve``'s settings on clients, and invalid settings."""

import hashlib
import json
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

import models
from h2_servers import Peer
from http_servers import PATIENCE_S, Client, get, post
from penstock.protocol import messages
from processes import ServerProcess

ALICE, OPERATOR = "alice's key, long enough", "operator's key, long enough"
INFER = "/inference.GRPCInferenceService/ModelInfer"
LOG_SETTINGS = "/inference.GRPCInferenceService/LogSettings"
OK, PERMISSION_DENIED, UNAUTHENTICATED = 0, 7, 16
X = [1.0, 2.0, 3.0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "linear.onnx"
    path.write_bytes(models.linear().data)
    return path


def start(*targets: Path, arguments: tuple[str, ...] = (), **settings: object) -> ServerProcess:
    return ServerProcess(*targets, arguments=("--json", *arguments), **settings)


def configured(model: Path, text: str) -> tuple[str, str]:
    """Arguments for a configuration file beside ``model``."""
    path = model.parent / "server.toml"
    path.write_text(text)
    return "--config", str(path)


def address(server: ServerProcess, name: str) -> tuple[str, int]:
    host, _, port = json.loads(server.line)[name].rpartition(":")
    return host, int(port)


def infer(name: str = "linear", headers: str = "", **output: Any) -> bytes:
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": X}
    outputs = {"outputs": [{"name": "y", "parameters": output}]} if output else {}
    return post(json.dumps({"inputs": [tensor]} | outputs).encode(), headers, f"/v2/models/{name}/infer")


def grpc_infer(name: str = "linear") -> bytes:
    request = messages.ModelInferRequest(model_name=name)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 3]).contents.fp32_contents.extend(X)
    data: bytes = request.SerializeToString()
    return data


def status(code: int, *, path: str = INFER, data: bytes = b"", where: tuple[str, int], **metadata: str) -> None:
    """Make a gRPC call on a new connection; the call must end with ``code``."""
    with Peer(where) as peer:
        peer.greet()
        assert peer.ask(1, data, path, **metadata).status == code


def expected() -> Any:
    return pytest.approx((X @ models.linear_weight()).tolist(), rel=1e-5)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two keys: one permits ``linear``, the other one everything."""
    folder = tmp_path_factory.mktemp("guarded")
    for name in ("linear", "other"):
        (folder / f"{name}.onnx").write_bytes(models.linear().data)
    keys = folder / "keys.toml"
    alice, operator = (hashlib.sha256(key.encode()).hexdigest() for key in (ALICE, OPERATOR))
    keys.write_text(
        f'[clients.alice]\nkey_sha256 = "{alice}"\nmodels = ["lin*"]\n'
        f'[clients.operator]\nkey_sha256 = ["{operator}"]\nadmin = true\n'
    )
    with start(folder / "linear.onnx", folder / "other.onnx", keys_file=keys) as server:
        yield server


@pytest.mark.parametrize(
    ("headers", "name", "code"),
    [
        ("", "linear", 401),
        ("X-API-Key: nobody's\r\n", "linear", 401),
        (f"X-API-Key: {ALICE}\r\n", "linear", 200),
        (f"Authorization: Bearer {ALICE}\r\n", "linear", 200),
        (f"X-API-Key: {ALICE}\r\n", "other", 403),
        (f"X-API-Key: {ALICE}\r\n", "absent", 403),
        (f"X-API-Key: {OPERATOR}\r\n", "other", 200),
    ],
)
def test_keys_open_models_over_http(guarded: ServerProcess, headers: str, name: str, code: int) -> None:
    with Client(address(guarded, "http")) as client:
        assert client.ask(infer(name, headers)).status == code


@pytest.mark.parametrize(
    ("metadata", "name", "code"),
    [
        ({}, "linear", UNAUTHENTICATED),
        ({"x_api_key": "nobody's"}, "linear", UNAUTHENTICATED),
        ({"x_api_key": ALICE}, "linear", OK),
        ({"authorization": f"Bearer {ALICE}"}, "linear", OK),
        ({"x_api_key": ALICE}, "other", PERMISSION_DENIED),
        ({"x_api_key": OPERATOR}, "other", OK),
    ],
)
def test_keys_open_models_over_grpc(guarded: ServerProcess, metadata: dict[str, str], name: str, code: int) -> None:
    status(code, data=grpc_infer(name), where=address(guarded, "grpc"), **metadata)


@pytest.mark.parametrize(("key", "code", "grpc_code"), [(ALICE, 403, PERMISSION_DENIED), (OPERATOR, 200, OK)])
def test_the_control_plane_is_for_admins(guarded: ServerProcess, key: str, code: int, grpc_code: int) -> None:
    header = f"X-API-Key: {key}\r\n"
    with Client(address(guarded, "http")) as client:
        for path in ("/v2/logging", "/v2/trace/setting", "/v2/systemsharedmemory/status"):
            assert client.ask(get(path, header)).status == code
        assert client.ask(post(b"{}", header, "/v2/logging")).status == code
    status(grpc_code, path=LOG_SETTINGS, where=address(guarded, "grpc"), x_api_key=key)


def test_what_keys_leave_open_and_what_they_hide(guarded: ServerProcess) -> None:
    with Client(address(guarded, "http")) as client:
        assert client.ask(get("/v2/health/ready")).status == 200
        assert client.ask(get("/v2/logging")).status == 401
        index = client.ask(post(b"", f"X-API-Key: {ALICE}\r\n", "/v2/repository/index"))
        assert [row["name"] for row in json.loads(index.body)] == ["linear"]


def test_the_settings_of_a_model(model: Path) -> None:
    (model.parent / "labels.txt").write_text("left\nright\n")
    arguments = configured(
        model,
        """
        [server]
        cache_bytes = 1_000_000
        [models.linear]
        max_batch_size = 5
        output = [{ name = "y", label_filename = "labels.txt" }]
        [models.linear.response_cache]
        enable = true
        [models.linear.dynamic_batching]
        preferred_batch_size = [2, 4]
        max_queue_delay_microseconds = 700
        """,
    )
    with start(model, arguments=arguments) as server, Client(address(server, "http")) as client:
        config = json.loads(client.ask(get("/v2/models/linear/config")).body)
        assert config["max_batch_size"] == 5
        assert config["dynamic_batching"]["preferred_batch_size"] == [2, 4]
        assert int(config["dynamic_batching"]["max_queue_delay_microseconds"]) == 700
        assert config["response_cache"] == {"enable": True}
        assert [client.ask(infer()).data for _ in range(2)] == [expected()] * 2
        (found,) = json.loads(client.ask(get("/v2/models/linear/stats")).body)["model_stats"]
        counts = {name: entry["count"] for name, entry in found["inference_stats"].items()}
        assert (counts["cache_hit"], counts["cache_miss"], counts["success"]) == (1, 1, 2)
        assert found["execution_count"] == 1
        (best,) = client.ask(infer(classification=1)).data
        scores = (X @ models.linear_weight()).tolist()
        winner = scores.index(max(scores))
        value, index, label = str(best).split(":")
        assert (float(value), index, label) == (
            pytest.approx(scores[winner], rel=1e-4),
            str(winner),
            ["left", "right"][winner],
        )


@contextmanager
def encrypted(where: tuple[str, int], ca: Path, protocol: str) -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols([protocol])
    with (
        socket.create_connection(where, PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=where[0]) as secure,
    ):
        assert secure.selected_alpn_protocol() == protocol
        yield secure


def test_tls(model: Path) -> None:
    ca, certificate, key = (model.parent / f"{name}.pem" for name in ("ca", "certificate", "key"))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(ca)
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    with start(model, tls_certificate=certificate, tls_key=key) as server:
        for name in ("http", "grpc"):
            where = address(server, name)
            with Client(where, ssl.create_default_context(cafile=str(ca))) as client:
                assert client.ask(infer()).data == expected()
            with encrypted(where, ca, "h2") as secure, Peer(secure) as peer:
                peer.greet()
                (message,) = peer.ask(1, grpc_infer(), INFER, **{":scheme": "https"}).messages
                assert messages.ModelInferResponse.FromString(message).model_name == "linear"
        with Client(address(server, "metrics")) as client:
            assert client.ask(get("/metrics")).status == 200


def test_the_unix_socket_is_for_both_protocols_and_goes_with_the_server(model: Path) -> None:
    path = model.parent / "socket"

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE_S)
        connection.connect(str(path))
        return connection

    with start(model, arguments=("--unix-socket", str(path))) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with connect() as connection, connection.makefile("rb") as reader:
            connection.sendall(infer(headers="Connection: close\r\n"))
            assert reader.readline() == b"HTTP/1.1 200 OK\r\n"
        with connect() as connection, Peer(connection) as peer:
            peer.greet()
            assert peer.ask(1, grpc_infer(), INFER).status == OK
        server.process.terminate()
        assert server.end() == (0, "")
    assert not path.exists()


def test_without_grpc(model: Path) -> None:
    with start(model, arguments=("--no-allow-grpc",)) as server:
        assert json.loads(server.line)["grpc"] == ""
        with Client(address(server, "http")) as client:
            assert client.ask(infer()).status == 200
        with Peer(address(server, "http")) as peer:
            peer.greet()
            with pytest.raises(EOFError):
                list(peer.frames(-1))


def test_without_http(model: Path) -> None:
    with start(model, arguments=("--no-allow-http",)) as server:
        assert json.loads(server.line)["http"] == ""
        status(OK, data=grpc_infer(), where=address(server, "grpc"))
        with Client(address(server, "grpc")) as client:
            client.send(infer())
            assert b"HTTP/1.1 200" not in client.socket.recv(1000)
        with Client(address(server, "metrics")) as client:
            assert client.ask(get("/metrics")).status == 200


def test_without_metrics(model: Path) -> None:
    with start(model, arguments=("--no-allow-metrics",)) as server:
        assert json.loads(server.line)["metrics"] == ""
        with Client(address(server, "http")) as client:
            assert client.ask(infer()).status == 200


WRONG = {
    "unknown setting": ("[server]\nhtp_port = 1", 2, "htp_port"),
    "wrong kind": ('[server]\nmax_queue = "many"', 2, "max_queue"),
    "no toml": ("[server", 2, "server.toml"),
    "no file": ('[server]\nkeys_file = "absent.toml"', 2, "keys file"),
    "no certificate": ('[server]\ntls_certificate = "absent.pem"', 2, "absent.pem"),
    "nothing": ("[server]\nallow_http = false\nallow_grpc = false", 2, "set at least one to true"),
    "absent model": ("[models.liner]\nmax_batch_size = 2", 2, "linear"),
    "absent field": ("[models.linear]\nmax_bach_size = 2", 2, "max_bach_size"),
    "no cache": ("[models.linear.response_cache]\nenable = true", 2, "cache_bytes"),
    "no labels": ('[models.linear]\noutput = [{ name = "y", label_filename = "absent.txt" }]', 2, "absent.txt"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("processes", ["1", "2"])
def test_settings_that_are_wrong(model: Path, case: str, processes: str) -> None:
    text, code, message = WRONG[case]
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "penstock",
            "serve",
            str(model),
            *ports,
            *configured(model, text),
            "--processes",
            processes,
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
