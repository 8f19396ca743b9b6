"""``penstock doctor``: check the configurations of a model repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from penstock.cli import options
from penstock.config import did_you_mean
from penstock.engines.base import Severity
from penstock.errors import NotFound
from penstock.online.repository.layout import Layout, check_filled
from penstock.online.repository.triton.doctor import Diagnosis, diagnose

_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow"}


def doctor(
    repository: Annotated[list[Path], typer.Argument(help="Model repositories.", show_default=False)],
    model: Annotated[list[str] | None, typer.Option(help="Check only this model; may be repeated.")] = None,
    model_config_name: Annotated[str, typer.Option(help="Check configs/NAME.pbtxt if the file exists.")] = "",
    write: Annotated[
        bool, typer.Option("--write", help="Write the corrected files; the originals are kept as .bak.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Check each model's configuration against the model, and show the corrected file.

    The exit code is 1 if the server would reject one of the models.

    [bold]Examples[/bold]

      penstock doctor models

      penstock doctor models --model bert --write
    """
    for root in repository:
        check_filled([root])
    models = Layout(tuple(repository)).models()
    names = sorted(models)
    for name in model or []:
        if name not in names:
            raise NotFound(f"no model '{name}' in the repository", did_you_mean(name, names))
    found = [diagnose(models, name, model_config_name) for name in names if not model or name in model]
    for each in found:
        if write and each.mended is not None:
            each.write()
    sick = sum(each.is_sick for each in found)
    if json:
        facts = [
            {"name": each.model, "file": str(each.path), "findings": each.findings, "mended": each.mended}
            for each in found
        ]
        print(msgspec.json.encode({"models": facts, "sick": sick, "written": write}).decode())
    else:
        console = Console(highlight=False, soft_wrap=True)
        for each in found:
            _show(console, each, write)
        console.print(f"{len(found)} model(s), {sick} with errors")
    if sick:
        raise typer.Exit(1)


def _show(console: Console, found: Diagnosis, write: bool) -> None:
    console.print(f"[bold]{escape(found.model)}[/bold]{'' if found.findings else '  no findings'}")
    for finding in found.findings:
        style = _STYLES[finding.severity]
        console.print(f"  [{style}]{finding.severity.value}[/{style}]  {escape(finding.message)}")
        if finding.hint:
            console.print(f"    fix: {escape(finding.hint)}")
    if found.mended is not None:
        action = "written to" if write else "mended" if found.before else "could be written to"
        console.print(f"  {action} {escape(str(found.path))}:")
        console.print(escape(found.diff()), end="")
