"""``penstock serve``: serve bundles and models over the Open Inference Protocol."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from penstock.config import read_file, resolve
from penstock.online.server import app
from penstock.online.server.config import ServerConfig


def serve(
    targets: Annotated[
        list[Path] | None, typer.Argument(metavar="[TARGET]...", help="Bundles or model files.", show_default=False)
    ] = None,
    model_repository: Annotated[
        list[str] | None, typer.Option(help="Folder of models in Triton's layout; may be given several times.")
    ] = None,
    model_control_mode: Annotated[
        Literal["none", "poll", "explicit"] | None,
        typer.Option(help="Whether models change as their folders do (poll), or as clients ask for (explicit)."),
    ] = None,
    load_model: Annotated[
        list[str] | None,
        typer.Option(help="With explicit, a model to load at the start, * for all; may be given several times."),
    ] = None,
    repository_poll_secs: Annotated[
        float | None, typer.Option(help="With poll, how often the folders are looked at; 15 unless given.")
    ] = None,
    exit_on_error: Annotated[
        bool | None, typer.Option(help="Whether the server ends if a model cannot be loaded at the start.")
    ] = None,
    strict_readiness: Annotated[bool | None, typer.Option(help="Whether a missing model makes it unready.")] = None,
    model_config_name: Annotated[str | None, typer.Option(help="Read configs/NAME.pbtxt where it is there.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless given.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port for HTTP; 0 picks a free one; 8000 unless given.")] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port for gRPC; 8001 unless given, or a free one with --http-port 0.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port for metrics; 8002 unless given, or a free one with --http-port 0.")
    ] = None,
    unix_socket: Annotated[str | None, typer.Option(help="Path of a Unix socket to listen on as well.")] = None,
    allow_http: Annotated[bool | None, typer.Option(help="Whether HTTP is spoken.")] = None,
    allow_grpc: Annotated[bool | None, typer.Option(help="Whether gRPC is spoken.")] = None,
    allow_metrics: Annotated[bool | None, typer.Option(help="Whether metrics are served.")] = None,
    grpc_implementation: Annotated[
        Literal["h2", "grpcio"] | None, typer.Option(help="What speaks gRPC; h2, the server's own, unless given.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that share the ports; each runs every model. 1 unless given.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Most rows in one batch; what the bundle says, or 64, unless given.")
    ] = None,
    instances: Annotated[
        int | None, typer.Option(help="Copies of each model; what the bundle says, or 1, unless given.")
    ] = None,
    isolation: Annotated[
        Literal["thread", "process"] | None,
        typer.Option(help="Where instances run: on threads, or each in a process that cannot end the server."),
    ] = None,
    rate_limit: Annotated[
        Literal["off", "execution_count"] | None,
        typer.Option(help="Let instances run only while they hold the resources that their models name."),
    ] = None,
    rate_limit_resource: Annotated[
        list[str] | None,
        typer.Option(help="How much there is of a resource, as name:count; may be given several times."),
    ] = None,
    tls_certificate: Annotated[str | None, typer.Option(help="PEM file of the certificate: switches TLS on.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file of its key; in the same file unless given.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(help="PEM file of the authority that clients' certificates must come from.")
    ] = None,
    keys_file: Annotated[str | None, typer.Option(help="TOML file of clients and what each may do.")] = None,
    cache_bytes: Annotated[int | None, typer.Option(help="Memory for answers of models with response_cache.")] = None,
    allow_client_shm: Annotated[
        Literal["auto", "true", "false"] | None,
        typer.Option(help="Whether clients may use shared memory; auto: where --host is loopback."),
    ] = None,
    access_log: Annotated[str | None, typer.Option(help="File for a JSON line per request; - is stdout.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file; table 'server' holds the settings, 'models.NAME' those of a model."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the ready line as JSON.")] = False,
) -> None:
    """Serve bundles and models over the Open Inference Protocol (KServe v2): HTTP, gRPC, shared memory.

    Prints one line when all models are loaded and warm. SIGTERM or Ctrl-C drains: readiness goes off, what is in flight is
    answered, then the server ends; a second signal ends it at once. Every setting has a name in the file and in the
    environment (PENSTOCK_SERVER_...), the most used ones an option here.

    [bold]Examples[/bold]

      penstock serve digits.bundle

      penstock serve --model-repository models --model-control-mode poll

      penstock serve digits.bundle other.onnx --host 0.0.0.0 --http-port 9000 --config server.toml
    """
    flags = {name: value for name, value in locals().items() if name not in ("targets", "config", "json")}
    flags["load_models"] = flags.pop("load_model")
    tables = read_file(config, ["server", "models"]) if config else {}
    resolved = resolve(ServerConfig, "server", tables.get("server"), os.environ, flags)

    def announce(ready: app.Ready) -> None:
        where = [f"{name}={getattr(ready, name)}" for name in ("http", "grpc", "metrics") if getattr(ready, name)]
        text = f"ready {' '.join(where)} models={','.join(ready.models)}"
        typer.echo(msgspec.json.encode(ready).decode() if json else text)

    folder = config.parent if config else Path()
    app.serve(resolved.config, targets or [], announce, tables.get("models", {}), folder)
