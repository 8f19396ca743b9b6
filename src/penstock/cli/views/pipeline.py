"""Shows the content of a pipeline's bundle, as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from penstock.bundle.pipeline import PipelineBundle
from penstock.cli.views.tables import specs_text
from penstock.pipeline.declaration import DeclaredStep, all_steps
from penstock.pipeline.function import Function, MapStep, ModelStep, Work
from penstock.pipeline.graph import PipelineStep
from penstock.pipeline.python_step import PythonStep

_MAX_SHOWN = 60
"""Number of characters of an option's value."""


def facts_of(opened: PipelineBundle) -> dict[str, Any]:
    """The content of a pipeline's bundle as plain data."""
    function = opened.function()
    return {
        "digest": opened.digest,
        "manifest": opened.manifest,
        "inputs": {name: str(kind) for name, kind in function.inputs.items()},
        "outputs": {name: str(kind) for name, kind in function.outputs.items()},
        "optional": [name for name in function.outputs if name in function.graph.optional],
        "steps": [
            {
                "name": path + step.name,
                "runs": runs,
                "inputs": step.inputs,
                "outputs": step.outputs,
                "when": _when(step),
            }
            for path, step, runs in _steps(opened, function)
        ],
        "models": {name: msgspec.to_builtins(one.manifest.signature) for name, one in opened.models.items()},
        "labels": {name: len(labels) for name, labels in opened.resources.labels.items()},
        "python": {path: opened.files[path].decode(errors="replace") for path in opened.manifest.python},
        "examples": len(opened.golden.examples),
    }


def show(console: Console, opened: PipelineBundle) -> None:
    """Print the content of a pipeline's bundle."""
    function, manifest = opened.function(), opened.manifest
    console.print(f"[bold]{escape(opened.name)}[/bold]  version {manifest.version}, {_kib(opened)} KiB", soft_wrap=True)
    if manifest.description:
        console.print(escape(manifest.description), soft_wrap=True)
    for title, text in _lines(opened, function):
        console.print(f"{title:<7} {escape(text)}", soft_wrap=True)
    for path in manifest.python:
        console.print(f"[yellow]python[/yellow]  {escape(path)}: code, which runs only with --allow-python")
        console.print(escape(opened.files[path].decode(errors="replace")), soft_wrap=True)
    count = len(opened.golden.examples)
    golden = f"recorded examples: {count}, replayed when" if count else "no examples, so nothing is compared when"
    console.print(f"golden  {golden} the bundle is loaded")
    console.print(f"digest  sha256:{opened.digest}, verified")


def _lines(opened: PipelineBundle, function: Function) -> Iterator[tuple[str, str]]:
    """The title and the text of each line about inputs, steps, outputs, models and labels."""
    for name, kind in function.inputs.items():
        yield "input", f"{name}  {kind}"
    for path, step, runs in _steps(opened, function):
        when = f"  when {step.condition}" if step.condition else ""
        wiring = f"{', '.join(step.inputs.values()) or '-'} → {', '.join(step.outputs.values())}"
        yield "step", f"{'  ' * path.count('/')}{step.name}: {runs}; {wiring}{when}"
    for name, kind in function.outputs.items():
        yield "output", f"{name}  {kind}" + ("  optional" if name in function.graph.optional else "")
    for name, bundle in opened.models.items():
        own, signature = bundle.manifest, bundle.manifest.signature
        tensors = f"{specs_text(signature.inputs)} → {specs_text(signature.outputs)}"
        yield "model", f"{name}: {tensors}; {own.serving.variant}, batches up to {own.serving.max_batch}"
    for name, labels in opened.resources.labels.items():
        yield "labels", f"{name}: {len(labels)}, {', '.join(labels)[:_MAX_SHOWN]}"


def _kib(opened: PipelineBundle) -> str:
    return f"{sum(entry.size_bytes for entry in opened.manifest.files) / 1024:.0f}"


def _steps(opened: PipelineBundle, function: Function, path: str = "") -> Iterator[tuple[str, PipelineStep, str]]:
    """The path of the maps around each step, the step, and what it runs."""
    declared = {one.name: one for one in all_steps(opened.declaration.steps)}
    for step in function.graph.steps:
        work = function.work[step.name]
        yield path, step, _title(work, declared.get(step.name))
        if isinstance(work, MapStep):
            yield from _steps(opened, work.inner, f"{path}{step.name}/")


def _when(step: PipelineStep) -> str:
    return str(step.condition) if step.condition else ""


def _title(work: Work, declared: DeclaredStep | None) -> str:
    if isinstance(work, ModelStep):
        return f"model {work.model}"
    if isinstance(work, MapStep):
        return f"steps for each of {work.over}, as {work.as_}"
    if isinstance(work, PythonStep):
        return f"Python function {work.function} of {work.file}"
    if declared is None:
        return "constant"
    return " ".join((f"step {declared.target}", _options(declared.options))).rstrip()


def _options(options: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{name} {str(value)[:_MAX_SHOWN]}" for name, value in options.items())
    return f"({shown})" if shown else ""
