"""``penstock tritonserver``: serve model repositories with the flags of Triton's ``tritonserver``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import msgspec
import typer

from penstock.cli.flags.triton_flags import DEFAULTS, translate
from penstock.cli.main import fail, run
from penstock.config import resolve
from penstock.errors import PenstockError
from penstock.online.server import app
from penstock.online.server.application import Ready
from penstock.online.server.config import ServerConfig


def tritonserver(
    flags: Annotated[list[str] | None, typer.Argument(metavar="--FLAG=VALUE", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON on stdout when ready.")] = False,
) -> None:
    """Serve model repositories as Triton's tritonserver does, with its flags and its defaults.

    The command accepts every flag of Triton; a line on stderr names each flag without effect. Settings without a flag come from the
    environment (PENSTOCK_SERVER_NAME). As in Triton, the exit code is 0 after SIGTERM or Ctrl-C, and 1 after any error.

    [bold]Examples[/bold]

      penstock tritonserver --model-repository=models

      penstock tritonserver --model-store models --model-control-mode explicit --load-model digits --http-port 9000
    """

    def announce(ready: Ready) -> None:
        services = {"GRPCInferenceService": ready.grpc, "HTTPService": ready.http, "Metrics Service": ready.metrics}
        for name, address in services.items():
            if address:
                print(f"Started {name} at {address}", file=sys.stderr, flush=True)
        if json:
            print(msgspec.json.encode(ready).decode(), flush=True)

    try:
        settings, notes = translate(flags or [])
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        app.serve(resolve(ServerConfig, "server", DEFAULTS, os.environ, settings).config, [], announce)
    except PenstockError as error:
        fail(error, json)
        raise typer.Exit(1) from None


def main() -> None:
    """Entry point of the console script; equivalent to ``penstock tritonserver``."""
    sys.argv.insert(1, "tritonserver")
    run()


if __name__ == "__main__":
    main()
