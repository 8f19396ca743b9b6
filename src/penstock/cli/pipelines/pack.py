"""``penstock pack``: pack a declared pipeline into a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape

from penstock.bundle.pack_pipeline import pack_pipeline, read_declaration
from penstock.bundle.target import check_target
from penstock.cli import options
from penstock.cli.views.tables import make_console

_NO_EXAMPLES = "the pipeline has no examples, so nothing is compared when it is loaded; add some under 'examples'"


def pack(
    pipeline: Annotated[
        Path, typer.Argument(help="The declaration of a pipeline, in YAML or TOML.", show_default=False)
    ],
    output: options.Output,
    version: Annotated[str, typer.Option(help="Version of the pipeline: a whole number.")] = "1",
    allow_python: options.AllowPython = False,
    force: options.Force = False,
    parents: options.Parents = False,
    json: options.Json = False,
) -> None:
    """Check a pipeline, record its examples, and pack it with its models, labels and files into one bundle.

    Names, types and shapes are checked from the inputs to the outputs. The examples run once, and their results are recorded. Whoever
    loads the bundle runs them again, and is refused a bundle that no longer gives the same results.

    [bold]Examples[/bold]

      penstock pack pipeline.yaml -o digits.bundle
    """
    options.check_folders([output], parents)
    check_target(output, read_declaration(pipeline).name, version, overwrite=force, folder=False)
    packed = pack_pipeline(pipeline, output, overwrite=True, allow_python=allow_python, version=version)
    function, notes = packed.function, [] if packed.examples else [_NO_EXAMPLES]
    size_bytes = sum(entry.size_bytes for entry in packed.manifest.files)
    if json:
        facts = {
            "bundle": str(output),
            "name": packed.manifest.name,
            "version": version,
            "inputs": {name: str(kind) for name, kind in function.inputs.items()},
            "outputs": {name: str(kind) for name, kind in function.outputs.items()},
            "steps": [step.name for step in function.graph.steps],
            "models": list(packed.manifest.models),
            "python": packed.manifest.python,
            "examples": packed.examples,
            "size_bytes": size_bytes,
            "notes": notes,
        }
        print(msgspec.json.encode(facts).decode())
        return
    console = make_console()
    shown = ", ".join(f"{name}: {kind}" for name, kind in function.outputs.items())
    console.print(
        f"{escape(packed.manifest.name)}: {len(function.graph.steps)} steps → {escape(shown)}", soft_wrap=True
    )
    console.print(
        f"recorded {packed.examples} example{'s' if packed.examples != 1 else ''} with the results of all steps"
    )
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(f"written to {escape(str(output))}, {size_bytes / 1024:.0f} KiB")
