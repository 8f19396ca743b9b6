"""``models`` as OpenVINO IR: an ``.xml`` file and its ``.bin`` in a folder of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openvino

import models
from penstock.artifact import Artifact

_folder = tempfile.TemporaryDirectory(prefix="openvino-models-")


def _converted(make: Callable[..., Artifact]) -> Callable[..., Artifact]:
    def convert(*arguments: Any, **named: Any) -> Artifact:
        source = make(*arguments, **named)
        path = Path(_folder.name, f"{source.digest[:16]}.xml")
        if not path.exists():
            openvino.save_model(openvino.Core().read_model(source.data), path, compress_to_fp16=False)
        return Artifact.from_file(path)

    return convert


identity = _converted(models.identity)
linear = _converted(models.linear)
fixed_batch = _converted(models.fixed_batch)
dynamic_image = _converted(models.dynamic_image)
sum_and_difference = _converted(models.sum_and_difference)
input_as_output = _converted(models.input_as_output)
unread_input = _converted(models.unread_input)
fails_on_odd_batch = _converted(models.fails_on_odd_batch)
increment = _converted(models.increment)


def unknown_operator() -> Artifact:
    good = linear()
    assert good.path is not None
    path = good.path.with_name("unknown.xml")
    path.write_bytes(good.data.replace(b'type="MatMul"', b'type="Frobnicate"'))
    path.with_suffix(".bin").write_bytes(good.path.with_suffix(".bin").read_bytes())
    return Artifact.from_file(path)
