"""Converts a model of the zoo in a process of its own: ``python -m benchmarks.convert_once NAME PATH MODE``.

``MODE`` is ``bare`` for the loader and the exporter alone, ``plain`` for a conversion without parity, or ``proved`` for one with
parity. With an empty ``PATH``, the model is made first.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.zoo.catalog import models
from benchmarks.zoo.model import ZooModel, keywords

MODES = ("bare", "plain", "proved")


def main() -> None:
    """Run the conversion that the command line names."""
    name, path, mode = sys.argv[1:]
    model = models()[name]
    with tempfile.TemporaryDirectory() as folder:
        given = Path(path) if path else model.make(Path(folder))
        if mode == "bare":
            export(given, model, Path(folder, "model.onnx"))
        else:
            from penstock.offline.convert.convert import convert  # noqa: PLC0415 - not a part of the bare export

            convert(given, Path(folder, "model.onnx"), **(keywords(model.options) | {"parity": mode == "proved"}))


def export(given: Any, model: ZooModel, target: Path) -> None:
    """Load ``given``, and export it as the framework does."""
    from penstock.offline.convert.registry import get_converter  # noqa: PLC0415
    from penstock.offline.convert.source import resolve  # noqa: PLC0415

    found = resolve(given, model.format, model.options.weights)
    source = get_converter(found.format).open(found.given, model.options)
    source.export(target, model.options.opset)
    source.close()


if __name__ == "__main__":
    main()
