"""The commands of the compression methods: a method's fields become options, and its docstrings become help texts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer
from rich.markup import escape

from penstock.cli.flags.quantities import parse_seconds, parse_share
from penstock.cli.methods.decode import decode
from penstock.cli.methods.show import show
from penstock.cli.options import check_folders
from penstock.cli.views.progress import StageProgress
from penstock.config import field_docs, plain_type
from penstock.errors import InvalidArgument
from penstock.offline.compress.job import Job
from penstock.offline.compress.method import Method, TrainingMethod
from penstock.offline.compress.options import Usage, option_name, usages
from penstock.offline.compress.table import METHODS

_PARSERS: dict[str, Callable[[str], Any]] = {"share": parse_share, "seconds": parse_seconds}


def make_command(name: str) -> Callable[..., None]:
    """Make the command of the method ``name``. typer reads its options from its signature."""
    read = MethodCommand(name)

    def command(**raw: Any) -> None:
        read.run(raw)

    parameters = read.parameters()
    command.__name__, command.__doc__ = name.replace("-", "_"), _help(read.method)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


class MethodCommand:
    """The command of one method: declares and parses the options, runs the method, and shows the outcome."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.method: type[Method] = METHODS[name].load()
        self._usages = usages(self.method)
        fields = msgspec.structs.fields(self.method)
        self._fields = {field.name: field for field in fields if not self._usages[field.name].hidden}
        self._common = {field.name for field in msgspec.structs.fields(TrainingMethod)}

    def parameters(self) -> list[inspect.Parameter]:
        """The parameters: files, then the options of the method, then the options that all methods share."""
        docs = field_docs(self.method)
        own = [_parameter(field, self._usages[name], docs[name]) for name, field in self._fields.items()]
        own.sort(key=lambda parameter: parameter.name in self._common)
        parameters = [*_files(self.method), *own, *_flags(self.method)]
        if self.name == "share":
            option = typer.Option("--decode", help="Decode a coded model to its ONNX file.")
            parameters.append(_keyword("decode", Annotated[bool, option], False))
        return parameters

    def run(self, raw: dict[str, Any]) -> None:
        """Run the method. ``raw`` holds the unparsed values of the parameters. Raises PenstockError."""
        given = {name: raw[name] for name in self._fields if raw[name] not in (None, []) and raw[name] is not False}
        written = [given.get(name) for name, usage in self._usages.items() if usage.writes]
        check_folders([raw.get("output"), *written], raw["parents"])
        if raw.get("decode"):
            self._check_decode(given, raw)
            decode(raw["model"], raw["output"], force=raw["force"], json=raw["json"])
            return
        options = self.method.make({name: self._read(name, value) for name, value in given.items()}, self._spell)
        files = (raw["model"], raw["data"], raw["evaluate"], raw.get("output"))
        job = Job(options, *files, force=raw.get("force", False), tell=_to_stderr)
        with StageProgress() as progress:
            outcome = job.run(progress)
        show(self.name, options, outcome, raw.get("output"), json=raw["json"])

    def _read(self, name: str, value: Any) -> Any:
        """The value of a field from the text of its option."""
        if self._fields[name].default is True:
            return False
        if parse := _PARSERS.get(self._usages[name].text):
            return parse(value)
        if isinstance(value, Path):
            return str(value)
        return tuple(value) if isinstance(value, list) else value

    def _spell(self, name: str) -> str:
        return option_name(name, self._fields[name].default if name in self._fields else None)

    def _check_decode(self, given: dict[str, Any], raw: dict[str, Any]) -> None:
        """Raise InvalidArgument if an option other than those of decoding was given together with ``--decode``."""
        names = [self._spell(name) for name in given if name not in self._common or name == "epochs"]
        names += [option for name, option in (("data", "--train"), ("evaluate", "--evaluate")) if raw[name]]
        if names:
            raise InvalidArgument(f"{names[0]} cannot be combined with --decode", "remove one of them")


def _files(method: type[Method]) -> list[inspect.Parameter]:
    if method.role == "model":
        model: Any = typer.Argument(help="The trained model, an ONNX file.", show_default=False)
    else:
        model = typer.Option(f"--{method.role}", help=f"ONNX file of the {method.role}.", show_default=False)
    output = typer.Option("--output", "-o", help="Path of the ONNX file to write.", show_default=False)
    data = typer.Option(
        *method.data_options,
        help="Samples for the method: npz file of rows, folder of npz files, images or sounds, JSON lines, CSV, Parquet, or "
        "module:function; `labels` are used if present.",
    )
    evaluate = typer.Option(
        help="Samples to measure accuracy and speed on, as above. The method does not use them. "
        "Without it, only sizes are reported."
    )
    return [
        _keyword("model", Annotated[Path, model]),
        *([_keyword("output", Annotated[Path, output])] if method.writes_model else []),
        _keyword("data", Annotated[Path | None, data], None),
        _keyword("evaluate", Annotated[Path | None, evaluate], None),
    ]


def _flags(method: type[Method]) -> list[inspect.Parameter]:
    parents = typer.Option("--parents", help="Create the folders of the output files if they are missing.")
    force = typer.Option("--force", help="Overwrite a target that is not an ONNX file.")
    json = typer.Option("--json", help="Print one JSON object as the last line.")
    flags = {"parents": parents, **({"force": force} if method.writes_model else {}), "json": json}
    return [_keyword(name, Annotated[bool, option], False) for name, option in flags.items()]


def _parameter(field: msgspec.structs.FieldInfo, usage: Usage, text: str) -> inspect.Parameter:
    """The option of one field. Its default is None, which stands for the method's own default."""
    name = option_name(field.name, field.default)
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


def _to_stderr(remark: str) -> None:
    print(remark, file=sys.stderr)
