"""``penstock trace``: when each step of a pipeline runs."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from penstock.cli import options
from penstock.cli.views.tables import make_console
from penstock.errors import InvalidArgument
from penstock.pipeline.streaming.timeline import Timeline, svg_chart, text_chart
from penstock.runtime import Pipeline
from penstock.storage.atomic import check_writable, whole_file

_TITLES = ("one item at a time", "in a stream")


def trace(
    bundle: Annotated[Path, typer.Argument(help="The bundle of a pipeline with one input.", show_default=False)],
    files: Annotated[list[Path], typer.Argument(help="Pictures, sounds or texts to run it on.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the timelines: .svg for both, or .json for Perfetto (the stream)."),
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Number of items; the files are repeated.")] = 32,
    allow_python: options.AllowPython = False,
    parents: options.Parents = False,
    json: options.Json = False,
) -> None:
    """Show when each step of a pipeline runs: for items one after the other, and for the same items in a stream.

    Each row of the chart is a thread, and each letter a step. Dots are idle time. A stream overlaps the steps of different items, and
    batches the calls of models. It makes several calls at a time, of fewer threads each.
    Recording takes some tenths of a millisecond per item, so the times of very short pipelines are too long.

    [bold]Examples[/bold]

      penstock trace shop.bundle photo.jpg

      penstock trace shop.bundle one.jpg two.jpg --items 100 -o shop.svg
    """
    options.check_folders([output], parents)
    if output is not None:
        if output.suffix not in (".svg", ".json"):
            raise InvalidArgument(f"'{output}' has an unknown suffix", "name a .svg or a .json file")
        check_writable(output)
    with Pipeline.open(bundle, allow_python=allow_python) as pipeline:
        given = list(islice(cycle(files), items))
        pipeline.trace(given[:1])  # the first calls are slower
        both = dict(zip(_TITLES, pipeline.trace(given), strict=True))
    if output is not None:
        _write(output, both)
    if json:
        shown = {"items": items, **{title.replace(" ", "_"): _facts(one) for title, one in both.items()}}
        print(msgspec.json.encode(shown | {"written": str(output) if output else None}).decode())
        return
    console = make_console()
    for title, timeline in both.items():
        console.print(f"{title}: {items} items in {timeline.wall_ns / 1e6:.1f} ms", style="bold")
        console.print(text_chart(timeline), markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        console.print(f"written to {output}")


def _facts(timeline: Timeline) -> dict[str, Any]:
    return {"ms": timeline.wall_ns / 1e6, "steps": {step: ns / 1e6 for step, ns in timeline.busy_ns().items()}}


def _write(path: Path, both: dict[str, Timeline]) -> None:
    text = svg_chart(list(both.items())).encode() if path.suffix == ".svg" else both[_TITLES[1]].chrome_trace()
    with whole_file(path) as file:
        file.write(text)
