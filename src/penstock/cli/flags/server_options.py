"""The server's settings as options of a command, generated from the fields of ``ServerConfig``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_origin

import msgspec
import typer
from rich.markup import escape

from penstock.config import Resolved, Setting, read_file, resolve, settings, write_text
from penstock.online.server.config import PANELS, ServerConfig


class ServerSettings(msgspec.Struct, frozen=True):
    """The configuration from all sources: the server's settings, and each model's settings by the model's name."""

    server: Resolved[ServerConfig]
    models: Mapping[str, Mapping[str, Any]]
    folder: Path
    """Base folder of relative paths in ``models``."""


def grouped_settings() -> Iterator[tuple[str, Setting]]:
    """Every setting of the server with the title of its group, in declared order."""
    panel = ""
    for setting in settings(ServerConfig):
        panel = PANELS.get(setting.name, panel)
        yield panel, setting


def option_name(setting: Setting) -> str:
    """The option's name for a setting. For a list, the name is singular, since the option may be repeated: ``--load-model``."""
    name = setting.name.removesuffix("s") if get_origin(setting.kind) is tuple else setting.name
    return f"--{name.replace('_', '-')}"


def with_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace ``command``'s parameter ``given: ServerSettings`` with one option per field of ServerSettings."""
    flags = [(panel, setting) for panel, setting in grouped_settings() if setting.is_flag]
    own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "given"]
    options = [
        *(_parameter(setting.name, *_option(panel, setting)) for panel, setting in flags),
        *(_parameter(name, str, typer.Option(hidden=True)) for name in ServerConfig.REMOVED),
        _parameter(
            "config", Path, typer.Option(help=escape("TOML file with a table [server] and tables [models.NAME]."))
        ),
        _parameter(
            "assignments",
            list[str],
            typer.Option(
                "--set",
                metavar="NAME=VALUE",
                help="Set any setting, including those without an option; may be repeated. Write lists as a,b or as a JSON array.",
            ),
        ),
    ]

    def body(**arguments: Any) -> None:
        names = [*(setting.name for _, setting in flags), *ServerConfig.REMOVED]
        values = {name: arguments.pop(name) for name in names}
        given = _read(arguments.pop("config"), values, arguments.pop("assignments") or [])
        command(given=given, **arguments)

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *options)]
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    body.__annotations__ = {each.name: each.annotation for each in parameters}
    body.__doc__ = command.__doc__
    return body


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(panel: str, setting: Setting) -> tuple[Any, Any]:
    """The type and the typer option of a setting."""
    name, default = option_name(setting), write_text(setting.default)
    is_list = get_origin(setting.kind) is tuple
    facts = [f"default: {default}" if default else "", setting.bounds, "repeatable" if is_list else ""]
    shown = ", ".join(filter(None, facts))
    text = setting.help.replace("``", "") + (f" [{shown}]" if shown else "")
    names = f"{name}/--no-{name[2:]}" if setting.kind is bool else name
    return (list[str] if is_list else setting.kind), typer.Option(names, help=escape(text), rich_help_panel=panel)


def _read(config: Path | None, flags: Mapping[str, Any], assignments: list[str]) -> ServerSettings:
    """Read the configuration from file, environment and options. Raises NotFound, InvalidConfig."""
    tables = read_file(config, ["server", "models"]) if config else {}
    server = resolve(ServerConfig, "server", tables.get("server"), os.environ, flags, assignments, config)
    return ServerSettings(server, tables.get("models", {}), config.parent if config else Path())
