"""``penstock split``: split a model between a device and a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from penstock.cli import options
from penstock.cli.flags.quantities import parse_milliseconds
from penstock.cli.views.cuts import splittable
from penstock.cli.views.tables import make_console, print_table
from penstock.errors import InvalidArgument
from penstock.offline.split import Cut, NetworkLink
from penstock.offline.split import split as split_model
from penstock.storage.atomic import replacing


def split(
    model: options.Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="New folder for head.onnx and tail.onnx.", show_default=False)
    ],
    mbits: Annotated[float, typer.Option(min=0.001, help="Speed of the link to the server, in Mbit/s.")],
    round_trip: Annotated[str, typer.Option(help="Round trip of the link, e.g. 20ms.")] = "20ms",
    server_speed: Annotated[
        float, typer.Option(min=0.001, help="Speed of the server, as a multiple of this machine's.")
    ] = 4.0,
    at: Annotated[
        str,
        typer.Option(help="Cut at this tensor instead of the best one; see `penstock inspect --cuts`."),
    ] = "",
    threads: Annotated[int, typer.Option(min=1, help="Threads per call on this machine.")] = 1,
    parents: options.Parents = False,
    json: options.Json = False,
) -> None:
    """Split a model in two: the head runs on this machine, and sends one tensor to the tail on a server.

    The command measures the head and the tail of each cut on this machine, and chooses the cut whose call takes the least time over
    the link. If a call is faster on one side alone, nothing is written.

    [bold]Examples[/bold]

      penstock split resnet.onnx --mbits 20 --round-trip 10ms --server-speed 8 -o parts

      penstock serve parts/tail.onnx        (on the server)
    """
    options.check_folders([output], parents)
    if output.exists():
        raise InvalidArgument(f"'{output}' exists", "name a new folder")
    artifact = splittable(model)
    found = split_model(artifact, NetworkLink(mbits, parse_milliseconds(round_trip), server_speed), threads, at)
    if found.head is not None and found.tail is not None:
        with replacing(output, overwrite=False) as folder:
            folder.mkdir()
            (folder / "head.onnx").write_bytes(found.head.data)
            (folder / "tail.onnx").write_bytes(found.tail.data)
    if json:
        shown: dict[str, Any] = {"best": found.best, "cuts": found.cuts, "written": str(output) if found.head else None}
        print(msgspec.json.encode(shown).decode())
        return
    console = make_console()
    titles = ["cut", "sent", "device ms", "link ms", "server ms", "total ms"]
    print_table(console, titles, [_row(one) for one in found.cuts])
    if found.head is None:
        side = "device" if found.best.device_ms else "server"
        console.print(f"nothing written: a call is fastest if the whole model runs on the {side}")
    else:
        console.print(f"written to {output}: head.onnx runs here, and tail.onnx on the server", soft_wrap=True)


def _row(cut: Cut) -> list[str]:
    name = cut.tensor or ("all on the device" if cut.device_ms else "all on the server")
    times = (cut.device_ms, cut.link_ms, cut.server_ms, cut.total_ms)
    return [name, f"{cut.sent_bytes / 1e3:.1f} kB", *(f"{one:.2f}" for one in times)]
