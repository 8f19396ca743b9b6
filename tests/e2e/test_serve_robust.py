"""``penstock serve`` with hostile clients, failing models and exhausted system resources: it continues to answer requests."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest

import models
from h2_servers import Peer, data_frame, message
from http_servers import LOOPS, Answer, Client, get, post
from penstock.artifact import Artifact
from penstock.protocol import h2_frames as h2
from penstock.protocol import messages
from penstock.tensor import DataType
from processes import PATIENCE_S, ServerProcess

INFER, STREAM = (f"/inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "ModelStreamInfer"))
RESET = struct.pack("ii", 1, 0)
ROWS = 1 << 20
TEN_MINUTES = 4 * 10**8
"""That the model ``count`` counts to, or longer."""
SECONDS = 1_500_000


def store(folder: Path, **artifacts: Artifact) -> list[Path]:
    paths = [folder / f"{name}.onnx" for name in artifacts]
    for path, artifact in zip(paths, artifacts.values(), strict=True):
        path.write_bytes(artifact.data)
    return paths


def start(*targets: Path, **settings: object) -> ServerProcess:
    return ServerProcess(*targets, arguments=("--json",), **settings)


def address(server: ServerProcess, name: str = "http") -> tuple[str, int]:
    host, _, port = json.loads(server.line)[name].rpartition(":")
    return host, int(port)


def infer(model: str, values: list[Any], datatype: str, shape: list[int] | None = None) -> bytes:
    tensor = {"name": "x", "shape": shape or [len(values)], "datatype": datatype, "data": values}
    return post(json.dumps({"inputs": [tensor]}).encode(), path=f"/v2/models/{model}/infer")


def count_to(number: int) -> bytes:
    return infer("count", [number], "INT64")


def binary(about: dict[str, Any], raw: bytes, model: str = "pair", more: dict[str, Any] | None = None) -> bytes:
    about = {"name": "x", "parameters": {"binary_data_size": len(raw)}} | about
    text = json.dumps({"inputs": [about], **(more or {})}).encode()
    length = f"Inference-Header-Content-Length: {len(text)}\r\n"
    return post(text + raw, length, path=f"/v2/models/{model}/infer")


def grpc_count_to(number: int) -> bytes:
    request = messages.ModelInferRequest(model_name="count")
    request.inputs.add(name="x", datatype="INT64", shape=[1])
    request.raw_input_contents.append(struct.pack("<q", number))
    return bytes(request.SerializeToString())


def resident_bytes(server: ServerProcess) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


def open_files(server: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def cpu_s(server: ServerProcess) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pending(server: ServerProcess) -> int:
    """The number of requests that are accepted but not answered."""
    with Client(address(server, "metrics")) as client:
        page = client.ask(get("/metrics")).body.decode()
    lines = [line for line in page.splitlines() if line.startswith("nv_inference_pending_request_count")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def until_connections(server: ServerProcess, count: int) -> None:
    """Return once the server has at most ``count`` open files."""
    while open_files(server) > count:
        with Client(address(server)) as client:
            client.ask(get("/v2/health/live"))


@pytest.fixture(scope="module", params=sorted(LOOPS))
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    targets = store(
        tmp_path_factory.mktemp("models"),
        pair=models.identity(DataType.FP32),
        text=models.identity(DataType.BYTES),
        table=models.gather(),
    )
    settings = {"request_timeout_s": 0.4, "idle_timeout_s": 0.8, "max_request_rows": 1 << 23}
    with start(*targets, event_loop=request.param, **settings) as server:
        yield server
        server.signal(signal.SIGTERM)
        assert server.end() == (0, "")


@pytest.fixture
def server(shared: ServerProcess) -> Iterator[ServerProcess]:
    """After the test, the fixture checks that the server answers requests and has released all resources."""
    before = open_files(shared)
    yield shared
    with Client(address(shared)) as client:
        assert client.ask(infer("pair", [1, 2], "FP32", [1, 2])).data == [1, 2]
    until_connections(shared, before)
    assert pending(shared) == 0


def drip(client: Client, text: bytes) -> Answer:
    """Send a byte whenever the server is silent for a while; returns the response."""
    client.socket.settimeout(0.02)
    for byte in text:
        try:
            client.socket.send(bytes((byte,)))
            client.socket.recv(1, socket.MSG_PEEK)
            break
        except TimeoutError:
            continue
    client.socket.settimeout(PATIENCE_S)
    return client.read()


@pytest.mark.parametrize("begun", [0, 20, 40, 200])
def test_slow_clients_are_told_and_cut_off(server: ServerProcess, begun: int) -> None:
    request = post(b"{" + b" " * 900)
    with Client(address(server)) as client:
        client.send(request[:begun])
        answer = drip(client, request[begun:])
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert client.is_closed


def test_slow_grpc_clients_are_told_and_cut_off(server: ServerProcess) -> None:
    with Peer(address(server)) as mute, Peer(address(server)) as half, Peer(address(server)) as slow:
        mute.send(b"PRI * HTTP/2.0\r\n")
        half.greet()
        half.send(half.headers(1, INFER)[:20])
        slow.greet()
        slow.send(slow.headers(1, INFER), data_frame(1, b"\0\0"))
        assert half.goaway()[1] == h2.ErrorCode.ENHANCE_YOUR_CALM
        assert slow.answer(1).message.startswith("the request took longer than 0.4 s")
        for peer in (mute, half):
            assert peer.is_closed


def test_half_closed_clients_have_their_answers(server: ServerProcess) -> None:
    with Client(address(server)) as client:
        client.send(infer("pair", [1, 2], "FP32", [1, 2]) * 3)
        client.socket.shutdown(socket.SHUT_WR)
        assert [client.read_final().data for _ in range(3)] == [[1, 2]] * 3
        assert client.is_closed


@pytest.mark.parametrize("sent", [0.3, 0.9, 1.0])
def test_clients_that_vanish_in_the_middle_of_a_body_or_an_answer(server: ServerProcess, sent: float) -> None:
    request = binary({"shape": [ROWS, 2], "datatype": "FP32"}, bytes(8 * ROWS))
    for linger in (True, False):
        with Client(address(server)) as client:
            if linger:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.send(request[: int(sent * len(request))])
            if sent == 1.0:
                client.socket.recv(10)


def send_for_ever(client: Client, data: bytes, limit: int) -> int:
    """Send ``data`` repeatedly until the server accepts no more, at most ``limit`` bytes; returns the number of bytes sent."""
    client.socket.settimeout(0.1)
    sent = 0
    try:
        while sent < limit:
            sent += client.socket.send(data)
    except (TimeoutError, ConnectionError):
        pass
    return sent


def test_a_client_that_never_reads_is_bounded_and_cut_off(server: ServerProcess) -> None:
    rows = 1 << 16
    request = binary(
        {"shape": [rows, 2], "datatype": "FP32"}, bytes(8 * rows), more={"parameters": {"binary_data_output": True}}
    )
    with Client(address(server)) as client:
        assert client.ask(request).status == 200
        before = resident_bytes(server)
        assert send_for_ever(client, request, 512 << 20) < 128 << 20
        # Its answers and requests in hand, at most ``max_pipelined`` of each, half a megabyte a piece.
        assert resident_bytes(server) - before < 128 << 20
        client.socket.settimeout(PATIENCE_S)
        while True:  # what the system has buffered is still read, and then it is cut off
            try:
                if not client.socket.recv(1 << 20):
                    break
            except ConnectionResetError:
                break


def test_a_grpc_client_that_never_reads_is_bounded_and_cut_off(server: ServerProcess) -> None:
    request = messages.ModelInferRequest(model_name="pair")
    request.inputs.add(name="x", datatype="FP32", shape=[1 << 16, 2])
    request.raw_input_contents.append(bytes(8 << 16))
    data = message(request.SerializeToString())
    with Peer(address(server)) as peer:
        peer.greet()
        before = resident_bytes(server)
        peer.send(peer.headers(1, STREAM), *(data_frame(1, data[at : at + 16384]) for at in range(0, len(data), 16384)))
        answer = peer.answer(1)  # which it lets fill one window, and no more
        assert answer.reset == h2.ErrorCode.CANCEL
        assert resident_bytes(server) - before < 64 << 20


def test_the_largest_body_and_one_byte_more(tmp_path: Path) -> None:
    with start(*store(tmp_path, pair=models.identity(DataType.FP32)), max_request_rows=1 << 23) as server:
        send_the_largest_body(server)


def send_the_largest_body(server: ServerProcess) -> None:
    rows = (64 << 20) // 8 - 100
    raw = np.arange(2 * rows, dtype=np.float32).tobytes()
    outputs = {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    with Client(address(server)) as client:
        answer = client.ask(binary({"shape": [rows, 2], "datatype": "FP32"}, raw, more=outputs))
        assert answer.status == 200
        assert answer.body.endswith(raw[-4096:])
        assert len(answer.body) - int(answer.headers["inference-header-content-length"]) == len(raw)
    with Client(address(server)) as client:
        head = b"POST /v2/models/pair/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (
            (64 << 20) + 1
        )
        assert client.ask(head).status == 413, "before any of it is sent"
        assert client.is_closed


def hostile() -> dict[str, bytes]:
    """Requests whose shapes declare more data than they contain."""
    huge, fp32 = [1 << 40, 1 << 40], {"datatype": "FP32"}
    path = "/v2/models/pair/infer"
    text = {"datatype": "BYTES", "shape": [1, 2]}
    return {
        "2^40 elements": infer("pair", [1, 2], "FP32", [1 << 40, 2]),
        "a product of 2^80": infer("pair", [1, 2], "FP32", huge),
        "a product that wraps to 2": infer("pair", [1, 2], "FP32", [(1 << 63) + 1, 2]),
        "a product of 0": infer("pair", [], "FP32", [0, 1 << 62]),
        "binary, 2^40": binary(fp32 | {"shape": [1 << 40, 2]}, bytes(8)),
        "binary, 2^80 bytes": binary(fp32 | {"shape": huge, "parameters": {"binary_data_size": 1 << 82}}, bytes(8)),
        "binary, wraps to 8": binary(fp32 | {"shape": [(1 << 61) + 1, 2]}, bytes(8)),
        "rank 10^4": infer("pair", [1, 2], "FP32", [1] * 10_000),
        "nested arrays": post(b'{"inputs":' + b"[" * 100_000, path=path),
        "nested data": post(
            b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":' + b"[" * 100_000, path=path
        ),
        "nested objects": post(b'{"a":' * 100_000, path=path),
        "nested and closed": post(b"[" * 100_000 + b"]" * 100_000, path=path),
        "generate, nested": post(b'{"x":' + b"[" * 100_000, path="/v2/models/pair/generate"),
        "a length of 4 GiB": binary(text, b"\xff\xff\xff\xff" + b"a" * 8, "text"),
        "a length too short": binary(text, b"\x01\0\0\0ab", "text"),
        "lengths without content": binary(text | {"shape": [1 << 20, 2]}, b"\0\0\0\0" * 4, "text"),
        "a length of 10^30": binary(fp32 | {"shape": [1, 2], "parameters": {"binary_data_size": 10**30}}, bytes(8)),
        "an index that is not there": infer("table", [99], "INT64"),
    }


@pytest.mark.parametrize("name", hostile())
def test_what_claims_more_than_there_is(server: ServerProcess, name: str) -> None:
    with Client(address(server)) as client:
        before = resident_bytes(server)
        answer = client.ask(hostile()[name])
        assert answer.status == 400, answer.error
        assert resident_bytes(server) - before < 32 << 20
        assert client.ask(infer("table", [3, 1], "INT64")).data == [3, 1], "on the same connection"


def test_a_rejected_index_fails_those_that_it_was_asked_by(server: ServerProcess) -> None:
    with Client(address(server)) as client:
        client.send(b"".join(infer("table", [99 if n % 2 else n % 4], "INT64") for n in range(20)))
        answers = [client.read() for _ in range(20)]
    assert {answer.status for answer in answers[1::2]} == {400}
    assert all(answer.status == 400 or answer.data == [n % 4] for n, answer in enumerate(answers))


def test_thousands_of_connections_opened_and_reset(server: ServerProcess) -> None:
    before = resident_bytes(server)
    for _ in range(30):
        clients = [socket.create_connection(address(server), PATIENCE_S) for _ in range(100)]
        for number, client in enumerate(clients):
            client.send((b"", b"G", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", infer("table", [0], "INT64"))[number % 4])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
    assert resident_bytes(server) - before < 32 << 20


@pytest.mark.parametrize("loop", LOOPS)
def test_running_out_of_descriptors(tmp_path: Path, loop: str) -> None:
    with start(*store(tmp_path, table=models.gather()), event_loop=loop, log_error=False) as server:
        limit = open_files(server) + 30
        hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, hard))
        early = Client(address(server))
        assert early.ask(get("/v2/health/live")).status == 200
        crowd = [socket.create_connection(address(server), PATIENCE_S) for _ in range(100)]
        while open_files(server) < limit:
            assert early.ask(get("/v2/health/live")).status == 200
        before = cpu_s(server)
        asked = 0
        while asked < 300:
            assert early.ask(infer("table", [1], "INT64")).data == [1], "who is connected is answered"
            asked += 1
        assert cpu_s(server) - before < 2, "nothing spins"
        for client in crowd:
            client.close()
        while open_files(server) > limit - 20:
            assert early.ask(get("/v2/health/live")).status == 200
        with early, Client(address(server)) as late:
            assert late.ask(infer("table", [2], "INT64")).data == [2], "and others once there is room"
        server.signal(signal.SIGTERM)
        assert server.end() == (0, "")


def test_a_model_that_hangs_is_ended_and_one_that_dies_is_started_again(tmp_path: Path) -> None:
    with (
        start(*store(tmp_path, count=models.count_to()), isolation="process", model_timeout_s=1) as server,
        Client(address(server)) as client,
    ):
        assert client.ask(count_to(10)).data == [10]
        hung = client.ask(count_to(TEN_MINUTES))
        assert (hung.status, "the model took longer than 1 s, so its process was ended" in hung.error) == (500, True)
        while client.ask(get("/v2/models/count/ready")).status != 200:
            pass
        assert client.ask(count_to(11)).data == [11]
        client.send(count_to(TEN_MINUTES))
        while pending(server) == 0:
            pass
        (child,) = children(server.process.pid)
        os.kill(child, signal.SIGKILL)
        died = client.read()
        assert (died.status, died.error) == (500, "the model's process died in the middle of this batch")
        while client.ask(get("/v2/models/count/ready")).status != 200:
            pass
        assert client.ask(count_to(12)).data == [12]


def children(pid: int) -> list[int]:
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


@pytest.mark.parametrize("loop", LOOPS)
def test_all_that_was_accepted_is_answered_before_the_end(tmp_path: Path, loop: str) -> None:
    """HTTP, gRPC and gRPC streams; the client leaves the last stream open."""
    with (
        start(*store(tmp_path, count=models.count_to()), event_loop=loop, shutdown_grace_s=0) as server,
        grpc.insecure_channel("{}:{}".format(*address(server, "grpc"))) as channel,
    ):
        grpc.channel_ready_future(channel).result(PATIENCE_S)
        clients = [Client(address(server)) for _ in range(3)]
        clients[0].send(count_to(SECONDS))
        while pending(server) == 0:
            pass
        for number, client in enumerate(clients):
            client.send((count_to(1) if number else b"") + count_to(2))
        unary = [channel.unary_unary(INFER).future(grpc_count_to(number)) for number in (3, 4)]
        asked: SimpleQueue[bytes | None] = SimpleQueue()
        stream = channel.stream_stream(STREAM)(iter(asked.get, None))
        for number in (5, 6):
            asked.put(grpc_count_to(number))
        # All wait for the first one; a second request of a connection waits for its first.
        while pending(server) < 7:
            assert not unary[0].done()
        server.signal(signal.SIGTERM)
        for number, client in enumerate(clients):
            with client:
                assert [client.read().data for _ in range(2)] == [[1 if number else SECONDS], [2]]
                assert client.is_closed
        assert [value(call.result(PATIENCE_S)) for call in unary] == [3, 4]
        assert [value(next(stream)) for _ in range(2)] == [5, 6]
        with pytest.raises(grpc.RpcError) as end:
            next(stream)
        assert end.value.code() is grpc.StatusCode.UNAVAILABLE
        asked.put(None)
        assert server.end_unmerged() == (0, "")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_model_that_is_left_behind_does_not_abort_the_process(tmp_path: Path, loop: str) -> None:
    settings = {"event_loop": loop, "shutdown_grace_s": 0, "drain_timeout_s": 0.1}
    with start(*store(tmp_path, count=models.count_to()), **settings) as server, Client(address(server)) as client:
        client.send(count_to(TEN_MINUTES))
        while pending(server) == 0:
            pass
        server.signal(signal.SIGTERM)
        code, errors = server.end()
        assert (code, "exited without waiting" in errors) == (1, True)


def value(answer: bytes) -> int:
    """The content of a serialized ModelInferResponse, from a unary call or a stream."""
    number: int = struct.unpack("<q", answer[-8:])[0]
    return number


def test_a_second_signal_ends_it_in_the_middle_of_a_request(tmp_path: Path) -> None:
    with (
        start(*store(tmp_path, count=models.count_to()), drain_timeout_s=600) as server,
        Client(address(server)) as client,
    ):
        client.send(count_to(TEN_MINUTES))
        while pending(server) == 0:
            pass
        server.signal(signal.SIGTERM)
        with Client(address(server)) as other:
            while other.ask(get("/v2/health/ready")).headers.get("connection") != "close":
                pass
        server.signal(signal.SIGTERM)
        code, errors = server.end()
        assert (code, "Traceback" in errors) == (1, False)
        assert client.is_closed


class LocalClient(Client):
    """Of a Unix socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise
        self._reader = self.socket.makefile("rb")


def test_it_is_alive_but_not_ready_before_models_are_warm(tmp_path: Path) -> None:
    path = tmp_path / "socket"  # nobody else can have it, as with a port
    target = store(tmp_path, count=models.count_to(fixed=SECONDS // 8))[0]
    seen: list[int] = []
    with ServerProcess(target, wait=False, unix_socket=path) as server:
        while 200 not in seen:
            assert server.process.poll() is None
            try:
                with LocalClient(path) as client:
                    assert client.ask(get("/v2/health/live")).status == 200
                    seen.append(client.ask(get("/v2/health/ready")).status)
                    assert (client.ask(get("/v2/models/count/ready")).status == 200) >= (seen[-1] == 200)
            except OSError:
                assert not seen, "it listens from the beginning on"
    assert set(seen) == {400, 200}
    assert sorted(seen, reverse=True) == seen
