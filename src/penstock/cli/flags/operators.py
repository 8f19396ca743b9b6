"""The option ``--ops``: operators of a model that the user defines. This module is imported by ``serve``, so it imports little."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.engines.custom_ops import run_file
from penstock.samples.user_code import apart_from_output

Ops = Annotated[
    Path | None,
    typer.Option(help="Python file that defines operators of the model with @penstock.register_op. It is run."),
]


def run_operators(ops: Path | None) -> None:
    """Run the user's file. What it prints goes to standard error. Raises NotFound, InvalidArgument."""
    if ops is not None:
        with apart_from_output():
            run_file(ops)
