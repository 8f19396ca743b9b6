"""``penstock config show``: every setting of the server with its value and origin."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
import typer

from penstock.cli import options
from penstock.cli.flags.server_options import ServerSettings, grouped_settings, with_server_options
from penstock.config import write_text

_HIDDEN = "(hidden)"


@with_server_options
def config(
    given: ServerSettings,
    action: Annotated[Literal["show"], typer.Argument(metavar="show", help="List all settings.", show_default=False)],
    json: options.Json = False,
) -> None:
    """Show the server's settings, with the value and the origin of each (default, file, environment NAME, flag or --set).

    The command takes the options of "penstock serve", and reads the same file and environment. It does not start a server. Values that
    may contain a password are hidden.

    [bold]Examples[/bold]

      penstock config show

      penstock config show --config server.toml --set max_queue=500 --json
    """
    rows = list(_rows(given))
    if json:
        facts = [dict(zip(("name", "value", "origin"), row[1:], strict=True)) for row in rows]
        print(msgspec.json.encode({"settings": facts}).decode())
        return
    width = max(len(name) for _, name, _, _ in rows)
    for panel, group in groupby(rows, key=lambda row: row[0]):
        print(panel)
        for _, name, value, origin in group:
            print(f"  {name:{width}}  {write_text(value) or '-'}  ({origin})")


def _rows(given: ServerSettings) -> Iterator[tuple[str, str, Any, str]]:
    """Yields panel, name, value and origin of each setting."""
    for (panel, setting), (name, value, origin) in zip(grouped_settings(), given.server.explain(), strict=True):
        yield panel, name, _HIDDEN if setting.is_secret and value else value, origin
    for model, fields in given.models.items():
        for field, value in fields.items():
            yield "Models of the file", f"models.{model}.{field}", value, "file"
