"""The command ``penstock``: finds the sub-command, and is the one place where errors become messages and exit codes.

=====  =========================================================================
exit   meaning
=====  =========================================================================
0      done
1      a failure of ours, or of an engine; ``bench``: some requests failed; ``doctor``: problems
2      the caller must change the command, the file or the data
3      no such file or model
4      no candidate meets the contract
5      a bundle was changed since it was packed
6      something is not available now: port in use, engine not installed
7      out of space, or past a limit
8      the target exists
130    interrupted
=====  =========================================================================
"""

from __future__ import annotations

import importlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import typer

from penstock.errors import Cancelled, Code, ContractUnmet, InvalidArgument, PenstockError
from penstock.version import __version__

_PANELS = {
    "Offline": {
        "build": "Build a bundle: optimise, quantise, measure and choose under a contract.",
        "compress": "Compress a model under a contract: prune, split, quantise, share, train; keep what pays.",
        "inspect": "Show what is in a bundle, what was measured, and what was rejected and why.",
        "demo": "Build, serve and measure the digits example, original against built.",
    },
    "Online": {
        "serve": "Serve bundles and models over the Open Inference Protocol (KServe v2).",
        "tritonserver": "Serve model repositories with the flags of Triton's tritonserver.",
        "infer": "Run a bundle or model over the rows of an npz file, in this process.",
        "config": "Show the server's settings and where each value comes from.",
        "doctor": "Hold the configurations of a model repository against its models, and mend them.",
        "bench": "Load a server, closed loop or open loop, and report latencies.",
    },
    "One method alone": {
        "quantize": "Quantise to INT8, or store weights in fewer bits, after training.",
        "qat": "Quantise to INT8, then train the integers to answer as the float model.",
        "sensitivity": "Rank groups of operators by the accuracy that INT8 costs in each, and the time it saves.",
        "prune": "Make the smallest weights zero, at once or step by step with retraining.",
        "prune-channels": "Take channels and heads out, so that a smaller dense model is left.",
        "low-rank": "Split heavy layers into thinner ones, as far as an error allows.",
        "share": "Let weights share a few values, and write or read the coded model.",
        "distill": "Train a student model to answer as a teacher does.",
    },
}
"""Every command and its one line of help, so that ``penstock --help`` loads none of them; by the panel that it is listed in."""

COMMANDS = {name: summary for panel in _PANELS.values() for name, summary in panel.items()}

_EXIT_CODES = {
    Code.INVALID_ARGUMENT: 2,
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
        make_app(_command(sys.argv[1:]))(prog_name="penstock")
    except PenstockError as error:
        sys.exit(fail(Cancelled("interrupted") if _interrupted(error) else error, as_json))
    except KeyboardInterrupt:
        sys.exit(fail(Cancelled("interrupted"), as_json))
    except Exception as error:  # noqa: BLE001 - ours to mend, so with its traceback; scripts get their object all the same
        if _interrupted(error):
            sys.exit(fail(Cancelled("interrupted"), as_json))
        traceback.print_exc()
        message = f"internal error: {type(error).__name__}: {error}"
        sys.exit(
            fail(PenstockError(message, "this is a defect of Penstock: please report it with the lines above"), as_json)
        )
    except SystemExit as exit:
        # Typer has met an interrupt, or a command line that is wrong and told so; scripts get their object all the same.
        if exit.code == _EXIT_CODES[Code.CANCELLED]:
            fail(Cancelled("interrupted"), as_json)
        elif exit.code == _EXIT_CODES[Code.INVALID_ARGUMENT] and as_json:
            _print_json(InvalidArgument("the command line is wrong", "see stderr, or --help"))
        raise


def make_app(command: str | None) -> typer.Typer:
    """The application with only ``command`` loaded; the others are there for the list in ``--help``."""
    app = typer.Typer(
        help="Penstock: from a trained model to a served one, with every decision measured.",
        epilog="A first look: penstock demo. Every command has --help with examples, and --json for scripts.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_options)
    for panel, commands in _PANELS.items():
        for name, summary in commands.items():
            body: Callable[..., Any] = _load(name) if name == command else _unloaded
            text = None if name == command else summary
            # The flags of another program are its command's to read.
            context = {"ignore_unknown_options": name == "tritonserver"}
            app.command(name, short_help=summary, help=text, rich_help_panel=panel, context_settings=context)(body)
    return app


def fail(error: PenstockError, as_json: bool) -> int:
    """Tell the user of ``error`` and return the exit code for it."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  fix: {error.hint}", file=sys.stderr)
    if as_json:
        _print_json(error)
    return _EXIT_CODES.get(error.code, 1)


def _interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt is behind ``error``: packages that load native code tell of one as an ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _print_json(error: PenstockError) -> None:
    report: dict[str, Any] = {"error": {"code": error.code.value, "message": error.message, "hint": error.hint}}
    if isinstance(error, ContractUnmet):
        report["candidates"] = error.candidates
    print(msgspec.json.encode(report).decode())


def _command(arguments: list[str]) -> str | None:
    first = next((argument for argument in arguments if not argument.startswith("-")), None)
    return first if first in COMMANDS else None


def _load(name: str) -> Callable[..., Any]:
    with _noticing_interrupts():
        module = name.replace("-", "_")
        body: Callable[..., Any] = getattr(importlib.import_module(f"penstock.cli.{module}"), module)
    return body


@contextmanager
def _noticing_interrupts() -> Iterator[None]:
    """An interrupt stays one, even if a package that loads native code makes an ImportError of it that does not name its cause."""
    noticed = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        noticed.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody else's matter, or to be ignored
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
    raise AssertionError("a command was run that was not the one asked for")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Penstock: from a trained model to a served one, with every decision measured."""
