"""Shows the tensors at which ``penstock split`` can cut a model."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from penstock.artifact import Artifact, Format
from penstock.cli.flags.sources import runnable
from penstock.cli.views.tables import specs_text
from penstock.errors import Unsupported
from penstock.offline.split import cut_specs


def splittable(model: Path) -> Artifact:
    """The ONNX model at ``model``, converted if needed. Raises Unsupported for other models that an engine runs."""
    artifact = Artifact.from_file(runnable(model))
    if artifact.format is not Format.ONNX:
        raise Unsupported("only ONNX models can be split", f"convert it first: penstock convert {model} -o model.onnx")
    return artifact


def show_cuts(console: Console, model: Path, *, json: bool) -> None:
    """Print the tensors at which the model at ``model`` can be cut. Raises the errors of ``splittable``."""
    cuts = cut_specs(splittable(model))
    if json:
        print(msgspec.json.encode({"cuts": cuts}).decode())
        return
    for spec in cuts:
        kilobytes = math.prod(max(1, dim) for dim in spec.shape) * spec.datatype.itemsize / 1e3
        console.print(f"cut   {escape(specs_text([spec]))}, {kilobytes:.1f} kB for one row", soft_wrap=True)
    if cuts:
        least = min(cuts, key=lambda spec: math.prod(max(1, dim) for dim in spec.shape) * spec.datatype.itemsize)
        console.print(f"next  penstock split {model} --at {escape(least.name)} --mbits 20 -o parts", soft_wrap=True)
    else:
        console.print("the model cannot be split: no tensor inside it has all data flow through it")
