"""Shows the content of a pipeline's bundle, as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from penstock.bundle.pipeline import PipelineBundle
from penstock.pipeline.function import Function, MapStep, ModelStep, Work
from penstock.pipeline.python_step import PythonStep


def facts_of(opened: PipelineBundle) -> dict[str, Any]:
    """The content of a pipeline's bundle as plain data."""
    function = opened.function()
    return {
        "digest": opened.digest,
        "manifest": opened.manifest,
        "inputs": {name: str(kind) for name, kind in function.inputs.items()},
        "outputs": {name: str(kind) for name, kind in function.outputs.items()},
        "steps": [
            {"name": name, "runs": runs, "inputs": inputs, "outputs": outputs}
            for name, runs, inputs, outputs in _steps(function, "")
        ],
        "models": {name: msgspec.to_builtins(one.manifest.signature) for name, one in opened.models.items()},
        "labels": {name: len(labels) for name, labels in opened.resources.labels.items()},
        "python": {path: opened.files[path].decode(errors="replace") for path in opened.manifest.python},
        "examples": len(opened.golden.examples),
    }


def show(console: Console, opened: PipelineBundle) -> None:
    """Print the content of a pipeline's bundle."""
    function, manifest = opened.function(), opened.manifest
    inputs = ", ".join(f"{name} ({kind})" for name, kind in function.inputs.items())
    outputs = ", ".join(f"{name} ({kind})" for name, kind in function.outputs.items())
    console.print(f"[bold]{escape(opened.name)}[/bold]  {escape(inputs)} → {escape(outputs)}", soft_wrap=True)
    if manifest.description:
        console.print(escape(manifest.description), soft_wrap=True)
    console.print(f"version {manifest.version}; {sum(entry.size_bytes for entry in manifest.files) / 1024:.0f} KiB")
    for name, runs, reads, gives in _steps(function, ""):
        wiring = f"{', '.join(reads.values()) or '-'} → {', '.join(gives.values())}"
        console.print(f"step    {escape(f'{name}: {runs}; {wiring}')}", soft_wrap=True)
    for name, bundle in opened.models.items():
        console.print(f"model   {escape(f'{name}: {bundle.manifest.serving.variant}, sha256:{bundle.digest[:16]}…')}")
    for name, labels in opened.resources.labels.items():
        console.print(f"labels  {escape(f'{name}: {len(labels)}')}")
    for path in manifest.python:
        console.print(f"[yellow]python[/yellow]  {escape(path)}: code, which runs only with --allow-python")
        console.print(escape(opened.files[path].decode(errors="replace")), soft_wrap=True)
    console.print(f"golden  recorded examples: {len(opened.golden.examples)}, replayed when the bundle is loaded")
    console.print(f"digest  sha256:{opened.digest}, verified")


def _steps(function: Function, path: str) -> Iterator[tuple[str, str, Mapping[str, str], Mapping[str, str]]]:
    for step in function.graph.steps:
        work = function.work[step.name]
        yield path + step.name, _title(work), step.inputs, step.outputs
        if isinstance(work, MapStep):
            yield from _steps(work.inner, f"{path}{step.name}/")


def _title(work: Work) -> str:
    if isinstance(work, ModelStep):
        return f"model {work.model}"
    if isinstance(work, MapStep):
        return f"steps for each of {work.over}"
    if isinstance(work, PythonStep):
        return f"Python function {work.function} of {work.file}"
    options = msgspec.structs.asdict(work)
    shown = ", ".join(f"{name} {str(value)[:40]}" for name, value in options.items() if value not in ("", None))
    return f"{type(work).__name__}({shown})"
