"""``penstock serve``: serve bundles and models over the Open Inference Protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from penstock.artifact import listed
from penstock.cli.flags.operators import Ops, run_operators
from penstock.cli.flags.server_options import ServerSettings, with_server_options
from penstock.cli.flags.sources import runnable
from penstock.online.repository.layout import check_filled
from penstock.online.server import app
from penstock.online.server.application import Ready


@with_server_options
def serve(
    given: ServerSettings,
    targets: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[TARGET]...",
            help=f"Bundles, or models: {listed()}, or any source of `penstock convert`.",
            show_default=False,
        ),
    ] = None,
    ops: Ops = None,
    json: Annotated[bool, typer.Option("--json", help="Print the ready line as JSON.")] = False,
) -> None:
    """Serve bundles and models over the Open Inference Protocol (KServe v2): HTTP, gRPC, shared memory.

    The command prints one line when all models are loaded and warm. SIGTERM or Ctrl-C drains the server: it stops reporting ready,
    answers the requests in flight, and exits. A second signal ends it immediately.

    Every setting can be given in a file, in the environment (PENSTOCK_SERVER_NAME), or on the command line. Use --set for settings
    without an option. "penstock config show" lists all settings and their origin.

    [bold]Examples[/bold]

      penstock serve digits.bundle

      penstock serve --model-repository models --model-control-mode poll

      penstock serve digits.bundle other.onnx --host 0.0.0.0 --http-port 9000 --set max_queue=500
    """

    def announce(ready: Ready) -> None:
        where = [f"{name}={getattr(ready, name)}" for name in ("http", "grpc", "metrics") if getattr(ready, name)]
        text = f"ready {' '.join(where)} models={','.join(ready.models)}"
        typer.echo(msgspec.json.encode(ready).decode() if json else text)

    run_operators(ops)
    config = given.server.config
    if config.model_control_mode == "none" and config.exit_on_error and not targets:
        check_filled(map(Path, config.model_repository))  # no model could appear later
    app.serve(config, list(map(runnable, targets or [])), announce, given.models, given.folder)
