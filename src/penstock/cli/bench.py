"""``penstock bench``: send load to a server and report its throughput and latencies."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.cli import options
from penstock.cli.flags.quantities import parse_counts
from penstock.cli.views.tables import make_console
from penstock.errors import InvalidArgument, InvalidData
from penstock.perf.grpc_client import GrpcConnector, framed
from penstock.perf.http_client import Address, connect
from penstock.perf.load import closed_loop, open_loop, run
from penstock.perf.loops import LoadWindow, Target
from penstock.perf.oip_client import fetch_signature, infer_message, infer_request, random_inputs, request_shapes
from penstock.perf.tally import ClosedLoopResult, OpenLoopResult
from penstock.samples.open import load_dataset
from penstock.tensor import Array, DataType, Signature

Row = ClosedLoopResult | OpenLoopResult

_CONCURRENCIES = (1, 16, 64)
_RANDOM_REQUESTS = 16
_MAX_REQUESTS = 1024  # limit for requests read from a file, which are kept in memory
_SATURATED = 0.95  # fraction of a core; a client that uses more may be the bottleneck


def bench(
    url: Annotated[
        str,
        typer.Argument(help="The server, e.g. http://127.0.0.1:8000 or https://models.example.com", show_default=False),
    ],
    model: Annotated[str, typer.Option(help="Name of the model to send requests to.", show_default=False)],
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: numbers of connections to test. Default: 1,16,64.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Open loop: request rates to test, in requests per second, e.g. 100,500.")
    ] = None,
    duration: Annotated[float, typer.Option(help="Seconds to measure each connection count or rate.")] = 5.0,
    warmup: Annotated[float, typer.Option(help="Seconds of load before the measurement.")] = 1.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for a response; after that, the request counts as an error.")
    ] = 10.0,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZES",
            help="Shape of one input of a request, e.g. image=1,3,224,224; may be repeated. Required for an input that has any size"
            " in a dimension other than the first, unless --data is given.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "--inputs",
            help="npz file with arrays named after the model's inputs, sent row by row; for a pipeline, a picture or another file."
            " Default: plausible random tensors.",
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows per request. Default: 1.")] = None,
    binary: Annotated[
        bool, typer.Option("--binary", help="Send and receive tensors as raw bytes, not as JSON.")
    ] = False,
    grpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Send the requests over gRPC to this address, with TLS if the URL is https. Closed loop only.",
        ),
    ] = None,
    key: Annotated[
        str, typer.Option(envvar="PENSTOCK_KEY", help="API key to send to the server.", show_default=False)
    ] = "",
    ca: Annotated[
        Path | None,
        typer.Option(help="PEM file with the certificates to trust over https. Default: the system's certificates."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Measure throughput and latency of a model behind any Open Inference Protocol server.

    A closed loop (--concurrency) measures capacity: each connection sends its next request as soon as it has received a response.

    An open loop (--rate) measures latency at a given request rate: requests are sent on schedule, even if responses are slow. Latency
    is measured from the scheduled time, so a stall increases the latency of every request that it delays.

    Other users of the machine can see keys on the command line, but not in PENSTOCK_KEY.

    The exit code is 0 if all requests succeeded, otherwise 1.

    [bold]Examples[/bold]

      penstock bench http://127.0.0.1:8000 --model digits

      penstock bench http://127.0.0.1:8000 --model digits --concurrency 64 --binary --data evaluate.npz

      penstock bench http://127.0.0.1:8000 --model resnet --shape image=1,3,224,224

      penstock bench http://127.0.0.1:8000 --model digits --grpc 127.0.0.1:8001

      penstock bench http://127.0.0.1:8000 --model digits --rate 100,500,1000 --duration 20 --json

      PENSTOCK_KEY=$(cat key) penstock bench https://models.example.com --model digits --ca ca.pem
    """
    window = _window(duration, warmup, timeout)
    rates = _parse_rates(rate) if rate else ()
    if grpc and (rates or binary):
        raise InvalidArgument(
            "--grpc cannot be combined with --rate or --binary", "remove these options; gRPC always sends raw tensors"
        )
    if shape and data:
        raise InvalidArgument("--shape cannot be combined with --data", "remove one of them; the data has shapes")
    given = dict(map(_parse_shape, shape or ()))
    concurrencies = parse_counts(concurrency) if concurrency else () if rate else _CONCURRENCIES
    address = Address.parse(url, ca, key)
    signature = run(fetch_signature(address, model, timeout))
    tensors = _from_file(data, signature, batch or 1) if data else _random(signature, given, batch)
    if grpc:
        address = Address.parse(grpc if "://" in grpc else f"{address.scheme}://{grpc}", ca, key)
        requests = [framed(infer_message(model, one)) for one in tensors]
    else:
        requests = [infer_request(address, model, one, binary=binary) for one in tensors]
    target = Target(address, requests, GrpcConnector() if grpc else connect)
    rows = list(_measure(target, window, concurrencies, rates))
    if json:
        facts = {
            "url": address.url,
            "model": model,
            "protocol": "grpc" if grpc else "http/binary" if binary else "http/json",
            "batch": batch or 1,
            "shapes": {name: array.shape for name, array in tensors[0].items()},
        }
        print(msgspec.json.encode({**facts, "rows": rows}).decode())
    else:
        _print(f"{model} at {address.url}", rows)
    _explain(rows)
    if any(row.client_cpu > _SATURATED for row in rows):
        print("note: the client used a whole core; the server may be faster than these figures", file=sys.stderr)
    if any(row.errors for row in rows) or not any(row.requests for row in rows):
        raise typer.Exit(1)


def _measure(target: Target, window: LoadWindow, concurrencies: Sequence[int], rates: Sequence[float]) -> Iterator[Row]:
    address, requests = target.address, target.requests
    closed = partial(closed_loop, address, requests, window=window, connect=target.connect)
    loads: list[tuple[str, Callable[[], Coroutine[Any, Any, Row]]]] = [
        *((_connections(count), partial(closed, count)) for count in concurrencies),
        *((f"{rate:g}/s", partial(open_loop, address, requests, rate, window)) for rate in rates),
    ]
    seconds = (window.duration_s or 0.0) + window.warmup_s
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # The progress bar is redrawn only between rows, because a background thread would disturb the measurement.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=len(loads))
        for number, (load, measure) in enumerate(loads, 1):
            progress.update(task, description=f"{number} of {len(loads)}: {load}, {seconds:g} s", refresh=True)
            yield run(measure())


def _print(title: str, rows: Sequence[Row]) -> None:
    table = Table(
        title=f"{title}, latencies in ms", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for heading in ("load", "answers/s", "p50", "p95", "p99", "p99.9", "max", "requests", "errors"):
        table.add_column(heading, justify="left" if heading == "load" else "right", overflow="fold")
    errors: list[str] = []
    for row in rows:
        load = _connections(row.concurrency) if isinstance(row, ClosedLoopResult) else f"{row.rate:g}/s"
        latencies = (row.p50_ms, row.p95_ms, row.p99_ms, row.p999_ms, row.max_ms)
        table.add_row(load, f"{row.throughput:,.0f}", *map(_latency, latencies), f"{row.requests:,}", f"{row.errors:,}")
        errors += [f"{load}: {count:,} × {kind}" for kind, count in row.errors_by_kind.items()]
    console = make_console()
    console.print(table)
    for error in errors:
        console.print(error)


def _explain(rows: Sequence[Row]) -> None:
    """Print on stderr the first error message of each kind, and the reason if a row is empty."""
    said: dict[str, str] = {}
    for row in rows:
        said = row.first_errors | said
        if not row.requests and isinstance(row, OpenLoopResult):
            print(f"note: no request was scheduled at {row.rate:g}/s; raise --rate or --duration", file=sys.stderr)
    for kind, body in said.items():
        print(f"first {kind}: {_text(body)}", file=sys.stderr)


def _text(body: str) -> str:
    """The field ``error`` in the body of an error response or, without it, the whole body, on one line."""
    try:
        text = msgspec.json.decode(body, type=dict[str, Any])["error"]
    except (msgspec.DecodeError, KeyError):
        text = body
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def _latency(milliseconds: float) -> str:
    if math.isnan(milliseconds):
        return "-"
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _connections(count: int) -> str:
    return "1 connection" if count == 1 else f"{count} connections"


def _random(signature: Signature, given: Mapping[str, tuple[int, ...]], batch: int | None) -> list[dict[str, Array]]:
    shapes = request_shapes(signature, given, batch)
    free = [spec.name for spec in signature.inputs if spec.shape[:1] == (-1,) and spec.name not in given]
    if free and batch is None:
        names = ", ".join(f"'{name}'" for name in free)
        print(f"note: the first dimension of {names} has any size; each request has 1 row (--batch)", file=sys.stderr)
    return random_inputs(signature, shapes, _RANDOM_REQUESTS)


def _parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The name and the shape in ``NAME=1,3,224,224``; ``NAME=`` is the shape of a single number."""
    name, equals, sizes = text.rpartition("=")
    try:
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
    except ValueError:
        shape = (-1,)
    if not name or not equals or min(shape, default=0) < 0:
        raise InvalidArgument(f"--shape must be a name and sizes, got '{text}'", "write image=1,3,224,224, for example")
    return name, shape


def _from_file(path: Path, signature: Signature, batch: int) -> list[dict[str, Array]]:
    if len(signature.inputs) == 1 and signature.inputs[0].datatype is DataType.BYTES and _is_media(path):
        content = np.empty(1, np.object_)  # an array of fixed-size strings would lose zeros at the end
        content[0] = path.read_bytes()
        return [{signature.inputs[0].name: content}]
    data = load_dataset(path, signature)
    batch = batch if data.joins else 1
    whole = (call.inputs for call in data.calls(batch) if len(call.samples) == batch)
    requests = list(itertools.islice(whole, _MAX_REQUESTS))
    if not requests:
        raise InvalidData(f"'{path}' has {data.count} samples, too few for a batch of {batch}", "lower --batch")
    signature.check(requests[0])
    return requests


def _is_media(path: Path) -> bool:
    """True for a file that a pipeline takes, such as a picture."""
    return path.is_file() and path.suffix.lower() not in (".npz", ".npy", ".jsonl", ".ndjson", ".csv", ".parquet")


def _parse_rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise InvalidArgument(
            f"--rate must be a list of numbers above 0, got '{text}'", "write 500 or 100,500, for example"
        )
    return rates


def _window(duration_s: float, warmup_s: float, timeout_s: float) -> LoadWindow:
    if not (0 < duration_s < math.inf and 0 <= warmup_s < math.inf and 0 < timeout_s < math.inf):
        raise InvalidArgument(
            "--duration and --timeout must be above 0, and --warmup at least 0, got "
            f"{duration_s:g} s, {timeout_s:g} s and {warmup_s:g} s",
            "give finite numbers of seconds",
        )
    return LoadWindow(duration_s, warmup_s, timeout_s)
