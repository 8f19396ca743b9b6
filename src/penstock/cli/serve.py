"""``penstock serve``: serve bundles and models over the Open Inference Protocol."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from penstock.config import read_file, resolve
from penstock.online.server import app
from penstock.online.server.config import ServerConfig


def serve(
    targets: Annotated[list[Path], typer.Argument(metavar="TARGET...", help="Bundles or .onnx files.")],
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless given.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one; 8000 unless given.")] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Not served yet: accepted and ignored, with a note on stderr.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Not served yet: accepted and ignored, with a note on stderr.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Most rows in one batch; what the bundle says, or 64, unless given.")
    ] = None,
    instances: Annotated[
        int | None, typer.Option(help="Copies of each model; what the bundle says, or 1, unless given.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; its table 'server' holds the settings.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the ready line as JSON.")] = False,
) -> None:
    """Serve bundles and models over the Open Inference Protocol (KServe v2).

    Prints one line when all models are loaded and warm. SIGTERM or Ctrl-C drains: readiness goes off, what is in flight is
    answered, then the server ends; a second signal ends it at once.

    [bold]Examples[/bold]

      penstock serve digits.bundle

      penstock serve digits.bundle other.onnx --host 0.0.0.0 --http-port 9000 --config server.toml
    """
    for what, port in (("gRPC", grpc_port), ("metrics", metrics_port)):
        if port is not None:
            typer.echo(f"note: {what} is not served yet, so its port is ignored", err=True)
    flags = {"host": host, "http_port": http_port, "max_batch": max_batch, "instances": instances}
    file = read_file(config, ["server"]).get("server") if config else None
    resolved = resolve(ServerConfig, "server", file, os.environ, flags)

    def announce(ready: app.Ready) -> None:
        text = f"ready http={ready.http} models={','.join(ready.models)}"
        typer.echo(msgspec.json.encode(ready).decode() if json else text)

    app.serve(resolved.config, targets, announce)
