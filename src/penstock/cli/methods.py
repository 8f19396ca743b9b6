"""The commands of the compression methods, made from the table: options from the fields of the method, help from its docstrings."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from penstock.cli.decode import decode
from penstock.cli.inspect import make_console
from penstock.cli.progress import StageProgress
from penstock.cli.quantities import parse_seconds, parse_share
from penstock.config import field_docs, plain_type
from penstock.errors import InvalidArgument
from penstock.offline.compress.job import Job
from penstock.offline.compress.method import Method, TrainingMethod
from penstock.offline.compress.options import Usage, option_name, usages
from penstock.offline.compress.outcome import Outcome, times
from penstock.offline.compress.table import METHODS

_NOTHING_MEASURED = "speed and accuracy are not measured without --evaluate"
_NAME_WIDTH = 44
"""Longest name that fits into a table; reports have all of it."""
_PARSERS: dict[str, Callable[[str], Any]] = {"share": parse_share, "seconds": parse_seconds}


def make_command(name: str) -> Callable[..., None]:
    """The command of the method ``name``: a function whose signature typer reads."""
    method: type[Method] = METHODS[name].load()
    used = usages(method)
    fields = {field.name: field for field in msgspec.structs.fields(method) if not used[field.name].hidden}

    common = {field.name for field in msgspec.structs.fields(TrainingMethod)}

    def spell(field: str) -> str:
        return option_name(field, fields[field].default if field in fields else None)

    def command(**raw: Any) -> None:
        given = {key: raw[key] for key in fields if raw[key] is not None and raw[key] is not False and raw[key] != []}
        if raw.get("decode"):
            _refuse([spell(key) for key in given if key not in common or key == "epochs"], raw)
            decode(raw["model"], raw["output"], force=raw["force"], json=raw["json"])
            return
        for key, value in given.items():
            if fields[key].default is True:
                given[key] = False
            elif used[key].text in _PARSERS:
                given[key] = _PARSERS[used[key].text](value)
            elif isinstance(value, list | Path):
                given[key] = str(value) if isinstance(value, Path) else tuple(value)
        options = method.make(given, spell)
        files = [raw["model"], raw["data"], raw["evaluate"], raw.get("output")]
        job = Job(options, *files, force=raw.get("force", False), tell=_to_stderr)
        with StageProgress() as progress:
            outcome = job.run(progress)
        _show(name, options, outcome, raw.get("output"), json=raw["json"])

    command.__name__ = name.replace("-", "_")
    command.__doc__ = _help(method)
    own = [_parameter(method, field, used[key], docs) for docs in [field_docs(method)] for key, field in fields.items()]
    # Options that every method has come last.
    own.sort(key=lambda parameter: parameter.name in common)
    parameters = [*_files(method), *own, *_flags(method)]
    if name == "share":
        option = typer.Option("--decode", help="Read a coded file, write the ONNX file in it.")
        parameters.append(_keyword("decode", Annotated[bool, option], False))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _files(method: type[Method]) -> list[inspect.Parameter]:
    if method.role == "model":
        model: Any = typer.Argument(help="The trained model, an ONNX file.", show_default=False)
    else:
        model = typer.Option(f"--{method.role}", help=f"ONNX file of the {method.role}.", show_default=False)
    output = typer.Option("--output", "-o", help="Where to write the ONNX file.", show_default=False)
    data = typer.Option(
        *method.data_options,
        help="npz with samples for the method; an array named `labels` is used if present.",
    )
    evaluate = typer.Option(
        help="npz to measure accuracy and speed on, which the method does not see; without it, only sizes are reported."
    )
    return [
        _keyword("model", Annotated[Path, model]),
        *([_keyword("output", Annotated[Path, output])] if method.writes_model else []),
        _keyword("data", Annotated[Path | None, data], None),
        _keyword("evaluate", Annotated[Path | None, evaluate], None),
    ]


def _flags(method: type[Method]) -> list[inspect.Parameter]:
    force = typer.Option("--force", help="Write over a target that is not an ONNX file.")
    json = typer.Option("--json", help="Print one JSON object as the last line.")
    flags = {"force": force, "json": json} if method.writes_model else {"json": json}
    return [_keyword(name, Annotated[bool, option], False) for name, option in flags.items()]


def _parameter(
    method: type[Method], field: msgspec.structs.FieldInfo, usage: Usage, docs: dict[str, str]
) -> inspect.Parameter:
    """The option of one field. All defaults are None here: what is not given is left to the method."""
    name, text = option_name(field.name, field.default), docs[field.name]
    if field.default is True:
        text = f"Do not {text[:1].lower()}{text[1:]}"
    if isinstance(field.default, bool):
        return _keyword(field.name, Annotated[bool, typer.Option(name, help=text)], False)
    if not field.required and (shown := usage.default or _default(field.default, usage)):
        text = f"{text} Default: {shown}."
    option = typer.Option(name, help=text, show_default=False)
    if field.required:
        return _keyword(field.name, Annotated[Path, option])
    kind = plain_type(field.type)
    if usage.text:
        kind = Path if usage.text == "file" else str
    elif get_origin(kind) is tuple:
        kind = list[str]
    elif get_origin(kind) is Literal and not isinstance(get_args(kind)[0], str):
        kind = int
    return _keyword(field.name, Annotated[kind | None, option], None)


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default(value: object, usage: Usage) -> str:
    if value in (None, ()):
        return ""
    if isinstance(value, float):
        return f"{100 * value:g}%" if usage.text == "share" else f"{value:g}{'s' if usage.text == 'seconds' else ''}"
    return str(value)


def _help(method: type[Method]) -> str:
    examples = "\n\n".join(f"  {line}" for line in method.examples)
    paragraphs = (" ".join(part.split()) for part in (inspect.getdoc(method) or "").split("\n\n"))
    return "\n\n".join([*map(escape, paragraphs), "[bold]Examples[/bold]", examples])


def _refuse(given: list[str], raw: dict[str, Any]) -> None:
    """Raise InvalidArgument for an option that says how to share weights, together with ``--decode``."""
    given += [option for key, option in (("data", "--train"), ("evaluate", "--evaluate")) if raw[key]]
    if given:
        raise InvalidArgument(f"{given[0]} and --decode exclude each other", "leave one of them out")


def _to_stderr(remark: str) -> None:
    print(remark, file=sys.stderr)


def _show(name: str, method: Method, outcome: Outcome, output: Path | None, *, json: bool) -> None:
    if json:
        written = {"output": str(output)} if output else {}
        print(msgspec.json.encode({"command": name, **written, **outcome.summary()}).decode())
        return
    console, made = make_console(), outcome.made
    if made.heading:
        console.print(escape(made.heading), soft_wrap=True)
    if made.table:
        console.print(_table(made.table))
    if made.model is not None:
        console.print(_comparison(outcome, method.titles))
    for note in outcome.notes:
        console.print(f"[yellow]note[/yellow]    {escape(note)}")
    if made.model is not None and outcome.comparison is None:
        console.print(f"[yellow]note[/yellow]    {_NOTHING_MEASURED}")
    for path in (*made.files, *([output] if output else [])):
        console.print(f"written  {path}", markup=False)


def _comparison(outcome: Outcome, titles: tuple[str, str]) -> Table:
    """Original and result side by side."""
    before, after = outcome.original.size_bytes, outcome.model.size_bytes
    rows: list[tuple[str, ...]] = [("", *titles, "")]
    rows.append(("size, KiB", _kib(before), _kib(after), _smaller(before, after)))
    if outcome.coded:
        against = f"{_smaller(before, outcome.coded[1])} than the file"
        rows.append(("coded, KiB", *map(_kib, outcome.coded), against))
    if (found := outcome.comparison) is not None:
        accuracy = found.accuracy
        loss = f"loss {accuracy.loss.value:+.2%} (95 %: {accuracy.loss.low:+.2%} … {accuracy.loss.high:+.2%})"
        values = f"{found.original_accuracy:.2%}", f"{accuracy.value:.2%}"
        rows.append((f"{accuracy.metric}, {accuracy.samples} samples", *values, loss))
        call = f"p50 of {found.rows} row(s), ms"
        rows.append((call, f"{found.original_ms:.3f}", f"{found.compressed_ms:.3f}", times(found.speedup)))
    return _table(rows)


def _table(rows: Any) -> Table:
    """A table whose first column is text and whose others are numbers; the first row has the titles."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    titles, *lines = rows
    for number, title in enumerate(titles):
        table.add_column(escape(title), justify="right" if number else "left", no_wrap=True)
    for name, *cells in lines:
        short = name if len(name) <= _NAME_WIDTH else f"…{name[1 - _NAME_WIDTH :]}"
        table.add_row(*map(escape, (short, *cells)))
    return table


def _kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:.1f}"


def _smaller(before: int, after: int) -> str:
    return f"{before / after:.2f}x smaller" if after <= before else f"{after / before:.2f}x larger"
