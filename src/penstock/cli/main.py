"""The command ``penstock``: runs the sub-command, and turns every error into a message and an exit code.

=====  =========================================================================
exit   meaning
=====  =========================================================================
0      success
1      a failure of Penstock or of an engine; ``bench``: some requests failed; ``doctor``: problems
2      the caller must change the command, the file or the data
3      no such file or model
4      no candidate meets the contract; ``convert``: the outputs differ
5      a bundle was changed after it was packed
6      something is unavailable: port in use, engine not installed
7      out of disk space, or over a limit
8      the target exists
130    interrupted
=====  =========================================================================
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, Literal

import msgspec
import typer
import typer.completion

from penstock.errors import Cancelled, Code, ContractUnmet, InvalidArgument, PenstockError
from penstock.offline.compress.table import METHODS
from penstock.version import __version__

_PANELS = {
    "Build a bundle": {
        "convert": "Convert a model of any framework to ONNX, and prove that its outputs did not change.",
        "new": "Write the declaration of a pipeline for a model, from a template.",
        "build": "Optimise and quantise a model, measure the candidates, and pack the fastest that meets the contract.",
        "compress": "Search for the best sequence of compression methods that meets a contract.",
        "pack": "Check a pipeline, record its examples, and pack it with its models into one bundle.",
        "inspect": "Show the contents and measurements of a bundle, or what a model contains, needs and seems to take.",
    },
    "Serve": {
        "serve": "Serve bundles and models over the Open Inference Protocol (KServe v2).",
        "tritonserver": "Serve model repositories with the flags of Triton's tritonserver.",
        "config": "Show the server's settings and the origin of each value.",
        "doctor": "Check the configurations of a model repository against its models, and fix them.",
    },
    "Run and measure": {
        "infer": "Run a pipeline on files, or a model on the rows of an npz file, without a server.",
        "video": "Run a pipeline over the frames of a video, and summarise its outputs.",
        "trace": "Show when each step of a pipeline runs, one item at a time and in a stream.",
        "split": "Split a model between a device and a server, at the cut that is fastest over a link.",
        "bench": "Load-test a server with a closed or an open loop, and report throughput and latencies.",
    },
    "Single compression methods": {entry.name: entry.summary for entry in METHODS.values()},
    "Learn": {"help": "Explain a topic, such as data, accuracy or contract, with a page of the documentation."},
}
"""One line of help for every command, by panel. ``penstock --help`` needs no import of a command."""

COMMANDS = {name: summary for panel in _PANELS.values() for name, summary in panel.items()}

_PIPELINES = ("new", "pack", "trace", "video")
"""Commands on pipelines, which have their own folder."""

_REMOVED = {"demo": "run `make demo`, or python examples/digits/demo.py, in a checkout"}
"""Commands of earlier versions, with their replacements."""

_COMPLETE = "_PENSTOCK_COMPLETE"
"""Environment variable with which typer's completion scripts request completions of ``penstock``."""
_COUNTED = {"--synthetic": "0"}
"""Options whose value may be left out, with the value that they then have. Typer has no such options."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_EXIT_CODES = {
    Code.INVALID_ARGUMENT: 2,
    Code.PERMISSION_DENIED: 2,
    Code.UNIMPLEMENTED: 2,
    Code.NOT_FOUND: 3,
    Code.FAILED_PRECONDITION: 4,
    Code.DATA_LOSS: 5,
    Code.UNAVAILABLE: 6,
    Code.RESOURCE_EXHAUSTED: 7,
    Code.ALREADY_EXISTS: 8,
    Code.CANCELLED: 130,
}


def run() -> None:
    """Entry point of the console script."""
    as_json = "--json" in sys.argv
    try:
        make_app(_command(_words()))(_with_defaults(sys.argv[1:]), prog_name="penstock")
    except PenstockError as error:
        sys.exit(fail(Cancelled("interrupted") if _interrupted(error) else error, as_json))
    except KeyboardInterrupt:
        sys.exit(fail(Cancelled("interrupted"), as_json))
    except Exception as error:  # noqa: BLE001 - a defect is shown with its traceback
        if _interrupted(error):
            sys.exit(fail(Cancelled("interrupted"), as_json))
        traceback.print_exc()
        message = f"internal error: {type(error).__name__}: {error}"
        sys.exit(
            fail(PenstockError(message, "this is a bug in Penstock; please report it with the lines above"), as_json)
        )
    except SystemExit as exit:
        # Typer has already reported the interrupt or the wrong command line. With --json, a JSON object for scripts is printed too.
        if exit.code == _EXIT_CODES[Code.CANCELLED]:
            fail(Cancelled("interrupted"), as_json)
        elif exit.code == _EXIT_CODES[Code.INVALID_ARGUMENT] and as_json:
            told = getattr(
                exit.__context__, "format_message", lambda: "the command line is wrong"
            )()  # of typer's error
            _print_json(InvalidArgument(told, "see --help"))
        raise


def make_app(command: str | None) -> typer.Typer:
    """Make the application. Only ``command`` is imported; the other commands appear only in ``--help``."""
    app = typer.Typer(
        help="Penstock builds bundles from trained models and serves them. Every decision is based on measurements.",
        epilog="Every command has --help with examples, and --json for scripts. `penstock help` explains topics.",
        context_settings={"help_option_names": ["--help", "-h"]},
        no_args_is_help=True,
        add_completion=False,  # its --install-completion changes the user's files, and both options guess the shell
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_options)
    for panel, commands in _PANELS.items():
        for name, summary in commands.items():
            body: Callable[..., Any] = _load(name) if name == command else _unloaded
            text = None if name == command else summary
            # This command parses Triton's flags itself.
            context = {"ignore_unknown_options": name == "tritonserver"}
            app.command(name, short_help=summary, help=text, rich_help_panel=panel, context_settings=context)(body)
    return app


def fail(error: PenstockError, as_json: bool) -> int:
    """Print ``error`` and return its exit code."""
    print(f"error: {_printable(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"  fix: {_printable(error.hint)}", file=sys.stderr)
    if as_json:
        _print_json(error)
    return _EXIT_CODES.get(error.code, 1)


def _printable(text: str) -> str:
    """``text`` without the control characters of terminals, which names in files and messages of foreign code may contain."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _interrupted(error: BaseException | None) -> bool:
    """True if an interrupt caused ``error``. A package with native code may have turned the interrupt into an ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _print_json(error: PenstockError) -> None:
    report: dict[str, Any] = {
        "error": {"code": error.code.value, "message": error.message, "hint": error.hint},
        **error.facts,
    }
    if isinstance(error, ContractUnmet):
        report["candidates"] = error.candidates
    print(msgspec.json.encode(report).decode())


def _words() -> list[str]:
    """The arguments of the command line or, if a shell requests completions, the words typed so far."""
    if _COMPLETE not in os.environ:
        return sys.argv[1:]
    typer.completion.completion_init()  # type: ignore[attr-defined]
    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    return typed.split()[1:]


def _command(arguments: list[str]) -> str | None:
    first = next((argument for argument in arguments if not argument.startswith("-")), None)
    if first in _REMOVED:
        raise InvalidArgument(f"penstock has no command '{first}'; it was removed", _REMOVED[first])
    return first if first in COMMANDS else None


def _with_defaults(arguments: list[str]) -> list[str]:
    """``arguments``, with the values that were left out."""
    found: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        found.append(argument)
        if argument in _COUNTED and not following.isdigit():
            found.append(_COUNTED[argument])
    return found


def _load(name: str) -> Callable[..., Any]:
    with _noticing_interrupts():
        if name in METHODS:
            body: Callable[..., Any] = importlib.import_module("penstock.cli.methods.command").make_command(name)
        else:
            folder = "pipelines." if name in _PIPELINES else ""
            body = getattr(importlib.import_module(f"penstock.cli.{folder}{name}"), name)
    return body


@contextmanager
def _noticing_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt even if a package with native code replaces the interrupt by an ImportError without a cause."""
    noticed = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        noticed.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # the program has another handler, or ignores interrupts
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except ImportError:
        if noticed:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _unloaded() -> None:
    raise AssertionError("this command was not loaded")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


def _show_completion(shell: str | None) -> None:
    if shell is not None:
        names = {"prog_name": "penstock", "complete_var": _COMPLETE}
        print(typer.completion.get_completion_script(**names, shell=shell))  # type: ignore[attr-defined]
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    show_completion: Annotated[
        Literal["bash", "zsh", "fish", "powershell"] | None,
        typer.Option(
            "--show-completion",
            callback=_show_completion,
            is_eager=True,
            help="Print the script that completes commands and options in this shell, and exit.",
        ),
    ] = None,
) -> None:
    """Penstock builds bundles from trained models and serves them. Every decision is based on measurements."""
