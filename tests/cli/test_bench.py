"""Tests of ``penstock bench`` against real servers."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import trustme
import typer
from typer.testing import CliRunner, Result

import models
from penstock.cli.bench import bench
from penstock.errors import InvalidArgument, InvalidData, NotFound, PenstockError, Unavailable
from processes import ServerProcess
from servers import answer, double, serving_in_thread

KEY = "alice-0123456789"
SHORT = ["--model", "double", "--duration", "0.2", "--warmup", "0"]


def invoke(*arguments: str, environment: Mapping[str, str] | None = None) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, arguments, env=environment)


def test_json_has_a_row_per_concurrency_and_rate() -> None:
    with serving_in_thread(double) as address:
        result = invoke(address.url, *SHORT, "--concurrency", "1,4", "--rate", "100,200", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout.splitlines()[-1])
    assert (facts["url"], facts["model"], facts["protocol"]) == (address.url, "double", "http/json")
    assert [row.get("concurrency", row.get("rate")) for row in facts["rows"]] == [1, 4, 100, 200]
    for row in facts["rows"]:
        assert row["errors"] == 0
        assert row["requests"] > 0
        assert row["throughput"] > 0
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] <= row["p999_ms"]


def test_a_table_for_people() -> None:
    with serving_in_thread(double) as address:
        result = invoke(address.url, *SHORT, "--concurrency", "2", "--rate", "300", "--binary", "--batch", "4")
    assert result.exit_code == 0, result.output
    assert "2 connections" in result.stdout
    assert "300/s" in result.stdout


def test_inputs_from_a_file_go_row_by_row_in_turn(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    async def handle(request, writer):
        if request.method == "POST":
            seen.append(json.loads(request.body)["inputs"][0]["data"])
        await double(request, writer)

    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    np.savez(tmp_path / "x.npz", x=rows, labels=np.arange(5))
    with serving_in_thread(handle) as address:
        arguments = ("--concurrency", "1", "--data", str(tmp_path / "x.npz"), "--batch", "2")
        assert invoke(address.url, *SHORT, *arguments).exit_code == 0
        with pytest.raises(InvalidData, match="5 samples, too few for a batch of 6"):
            raise_from(invoke(address.url, *SHORT, *arguments[:-1], "6"))
        with pytest.raises(NotFound, match="no data file"):
            raise_from(invoke(address.url, *SHORT, "--inputs", str(tmp_path / "y.npz")))
    wanted = itertools.cycle([rows[:2].reshape(-1).tolist(), rows[2:4].reshape(-1).tolist()])
    assert seen
    assert all(got == want for got, want in zip(seen, wanted, strict=False))


def test_a_pipeline_gets_the_content_of_a_file(tmp_path: Path) -> None:
    seen: set[bytes] = set()

    async def handle(request, writer):
        image = {"name": "image", "datatype": "BYTES", "shape": [1]}
        if request.method == "GET":
            found = {"name": "double", "versions": ["1"], "platform": "pipeline", "inputs": [image], "outputs": [image]}
            writer.write(answer(json.dumps(found).encode()))
            return
        seen.add(request.body[int(request.headers["inference-header-content-length"]) :])
        output = image | {"data": ["a"]}
        writer.write(answer(json.dumps({"model_name": "double", "outputs": [output]}).encode()))

    content = b"\x89PNG\0\0"
    (tmp_path / "photo.png").write_bytes(content)
    with serving_in_thread(handle) as address:
        arguments = ("--concurrency", "1", "--binary", "--data", str(tmp_path / "photo.png"))
        assert invoke(address.url, *SHORT, *arguments).exit_code == 0
        with pytest.raises(InvalidData, match="not UTF-8 text"):
            raise_from(invoke(address.url, *SHORT, *arguments[:2], *arguments[3:]))
    assert seen == {len(content).to_bytes(4, "little") + content}


def test_what_the_server_said_is_shown_once_for_each_kind() -> None:
    async def handle(request, writer):
        if request.method == "POST":
            writer.write(answer(b'{"error":"batch-size must be <= 64"}', "400 Bad Request"))
        else:
            await double(request, writer)

    with serving_in_thread(handle) as address:
        result = invoke(address.url, *SHORT, "--concurrency", "1,2", "--json")
    assert result.exit_code == 1
    assert result.stderr.count("first HTTP 400: batch-size must be <= 64\n") == 1
    for row in json.loads(result.stdout.splitlines()[-1])["rows"]:
        assert row["first_errors"] == {"HTTP 400": '{"error":"batch-size must be <= 64"}'}


def test_a_load_without_a_request_says_so() -> None:
    with serving_in_thread(double) as address:
        result = invoke(address.url, *SHORT, "--rate", "0.000001")
    assert result.exit_code == 1
    assert "no request was scheduled at 1e-06/s" in result.stderr


def test_errors_are_shown_by_kind_and_give_exit_code_1() -> None:
    numbers = itertools.count()

    async def handle(request, writer):
        if request.method == "POST" and next(numbers) % 2 == 0:
            writer.write(answer(b'{"error":"full"}', "503 Service Unavailable"))
        else:
            await double(request, writer)

    with serving_in_thread(handle) as address:
        result = invoke(address.url, *SHORT, "--concurrency", "1")
    assert result.exit_code == 1
    assert "× HTTP 503" in result.stdout


def test_a_server_or_model_that_is_not_there() -> None:
    with pytest.raises(Unavailable, match=r"cannot connect to http://127\.0\.0\.1:1: .*penstock serve"):
        raise_from(invoke("http://127.0.0.1:1", *SHORT))
    with serving_in_thread(double) as address, pytest.raises(NotFound, match="does not describe model 'other'"):
        raise_from(invoke(address.url, "--model", "other"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--concurrency", "0"), "'0' is not a list of whole numbers"),
        (("--concurrency", "1,x"), "'1,x' is not a list of whole numbers"),
        (("--rate", "0"), "--rate must be a list of numbers above 0, got '0' .*100,500"),
        (("--rate", "many"), "--rate must be a list .* got 'many'"),
        (("--rate", "nan"), "--rate must be a list .* got 'nan'"),
        (("--duration", "0"), "--duration and --timeout must be above 0"),
        (("--warmup", "-1"), "--warmup at least 0, got .* and -1 s"),
    ],
)
def test_bad_values_are_refused_before_anything_is_sent(arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        raise_from(invoke("http://127.0.0.1:1", *SHORT, *arguments))


def test_the_model_must_be_named_and_help_teaches() -> None:
    missing = invoke("http://127.0.0.1:1")
    assert missing.exit_code == 2
    assert "--model" in missing.stderr
    assert "penstock bench http://127.0.0.1:8000 --model digits" in invoke("--help").stdout


def raise_from(result: Result) -> None:
    """Errors propagate to the only place that prints them."""
    assert result.exception is not None
    raise result.exception


def test_load_over_grpc(tmp_path: Path) -> None:
    model = tmp_path / "linear.onnx"
    model.write_bytes(models.linear().data)
    with ServerProcess(model) as server:
        http, grpc = (re.search(rf"{name}=(\S+)", server.line)[1] for name in ("http", "grpc"))  # type: ignore[index]
        arguments = ("--model", "linear", "--duration", "0.2", "--warmup", "0", "--concurrency", "4", "--json")
        result = invoke(f"http://{http}", "--grpc", grpc, *arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts["protocol"] == "grpc"
    assert facts["rows"][0]["errors"] == 0 < facts["rows"][0]["requests"]


def test_grpc_is_a_closed_loop_of_raw_tensors() -> None:
    for flags in (("--rate", "10"), ("--binary",)):
        result = invoke("http://127.0.0.1:1", "--grpc", "127.0.0.1:1", *SHORT, *flags)
        assert isinstance(result.exception, InvalidArgument)
        assert result.exception.message == "--grpc cannot be combined with --rate or --binary"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[ServerProcess, Path]]:
    """A server with a key and TLS, and the certificate of its authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "cert.pem")
    (tmp_path / "keys.toml").write_text(f'[clients.alice]\nkey = "{KEY}"\n')
    (tmp_path / "linear.onnx").write_bytes(models.linear().data)
    security = {"keys_file": tmp_path / "keys.toml", "tls_certificate": tmp_path / "cert.pem"}
    with ServerProcess(tmp_path / "linear.onnx", **security) as server:
        yield server, tmp_path / "ca.pem"


def test_a_server_with_keys_and_tls(guarded: tuple[ServerProcess, Path], tmp_path: Path) -> None:
    server, ca = guarded
    url = "https://{}:{}".format(*server.address)
    grpc = next(word for word in server.line.split() if word.startswith("grpc=")).partition("=")[2]
    few = ("--model", "linear", "--duration", "0.2", "--warmup", "0", "--concurrency", "2", "--json")
    loads: list[tuple[str, ...]] = [
        (),
        ("--binary",),
        ("--rate", "50"),
        ("--grpc", grpc),
        ("--grpc", f"https://{grpc}"),
    ]
    for load in loads:
        result = invoke(url, *few, *load, "--ca", str(ca), "--key", KEY)
        assert result.exit_code == 0, result.output
        facts = json.loads(result.stdout.splitlines()[-1])
        assert facts["url"].startswith("https://127.0.0.1:")
        assert all(row["requests"] and not row["errors"] for row in facts["rows"])
        assert KEY not in result.output
    assert invoke(url, *few, "--ca", str(ca), environment={"PENSTOCK_KEY": KEY}).exit_code == 0
    for key in ((), ("--key", "another")):
        with pytest.raises(PenstockError, match="HTTP 401"):
            raise_from(invoke(url, *few, "--ca", str(ca), *key))
    for protocol in ((), ("--grpc", grpc)):
        with pytest.raises(Unavailable, match="cannot connect") as caught:
            raise_from(invoke(url, *few, *protocol, "--key", KEY))
        assert "--ca FILE" in caught.value.hint
    with pytest.raises(InvalidArgument, match="cannot read certificates"):
        raise_from(invoke(url, *few, "--ca", str(tmp_path / "keys.toml")))
    with pytest.raises(InvalidArgument, match="cannot read certificates"):
        raise_from(invoke(url, *few, "--ca", str(tmp_path / "absent")))
    with pytest.raises(InvalidArgument, match="the key contains"):
        raise_from(invoke(url, *few, "--key", "a\r\nb"))


def sized(*shape: int):
    """A model called ``double`` of one input of this shape, which answers every request."""

    async def handle(request, writer):
        if request.method == "GET":
            found = {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape}], "outputs": []}
            writer.write(answer(json.dumps(found).encode()))
        else:
            seen.add(tuple(json.loads(request.body)["inputs"][0]["shape"]))
            writer.write(answer(b'{"outputs": []}'))

    seen: set[tuple[int, ...]] = set()
    return handle, seen


def test_no_size_is_invented_silently() -> None:
    handle, seen = sized(-1, 3, -1, -1)
    with serving_in_thread(handle) as address:
        with pytest.raises(InvalidArgument, match=r"input 'x' .* any size in dimension\(s\) 2, 3") as caught:
            raise_from(invoke(address.url, *SHORT))
        assert "--shape x=1,3,SIZE,SIZE" in caught.value.hint
        result = invoke(address.url, *SHORT, "--concurrency", "1", "--shape", "x=2,3,8,16", "--json")
    assert result.exit_code == 0, result.output
    assert seen == {(2, 3, 8, 16)}
    assert json.loads(result.stdout.splitlines()[-1])["shapes"] == {"x": [2, 3, 8, 16]}
    assert "--shape" not in result.stderr


def test_the_size_of_the_batch_is_said_unless_it_is_given() -> None:
    with serving_in_thread(double) as address:
        silent = invoke(address.url, *SHORT, "--concurrency", "1", "--batch", "1")
        said = invoke(address.url, *SHORT, "--concurrency", "1")
    assert "each request has 1 row (--batch)" in said.stderr
    assert "each request" not in silent.stderr


@pytest.mark.parametrize("text", ["x", "x=1,,2", "x=a", "=1,2", "x=-1,3"])
def test_a_shape_is_a_name_and_sizes(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--shape must be a name and sizes"):
        raise_from(invoke("http://127.0.0.1:1", *SHORT, "--shape", text))


def test_data_have_their_own_shapes() -> None:
    with pytest.raises(InvalidArgument, match="--shape cannot be combined with --data"):
        raise_from(invoke("http://127.0.0.1:1", *SHORT, "--shape", "x=1,3", "--data", "x.npz"))


@pytest.mark.parametrize("status", ["204 No Content", "302 Found", "404 Not Found", "500 Internal Server Error"])
def test_every_status_but_200_is_an_error(status: str) -> None:
    async def handle(request, writer):
        if request.method == "POST":
            writer.write(answer(b"", status))
        else:
            await double(request, writer)

    with serving_in_thread(handle) as address:
        result = invoke(address.url, *SHORT, "--concurrency", "1", "--json")
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert row["errors_by_kind"] == {f"HTTP {status[:3]}": row["requests"]}
    assert row["throughput"] == 0
