"""A process as ``worker/serve.py`` is, with a converter whose sources are Python code: the tests' stand-in for a hostile file."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock.offline.convert.base import Axis, ConvertOptions, Exported, Probes, TensorLink
from penstock.offline.convert.worker import serve
from penstock.tensor import DataType, Signature, TensorSpec


class CodeModel:
    """Runs code for each call. The code's variables are those of this class's methods."""

    def __init__(self, code: str, options: ConvertOptions) -> None:
        self._code = code
        self.options = options
        spec = TensorSpec("x", DataType.FP32, (-1, 2))
        self.signature = Signature((spec,), (TensorSpec("y", DataType.FP32, (-1, 2)),))
        self.axes: Any = {"x": (Axis(0, "batch"),)}
        self._run("open")

    def _run(self, call: str, **variables: Any) -> Any:
        scope = {"call": call, "self": self, "np": np, "os": os, "result": None, **variables}
        exec(self._code, scope)
        return scope["result"]

    def forward(self, inputs):
        found = self._run("forward", inputs=inputs)
        return {"y": inputs["x"] * 2} if found is None else found

    def values(self, inputs, names):
        found = {"double": inputs["x"] * 2, "phase": inputs["x"] * 1j, "name": np.array([b"a"], object)}
        return {name: found[name] for name in names if name in found}

    def probes(self, seed, *, brief=False):
        return Probes(tuple(self._run("probes", seed=seed) or ()), ("one of two",))

    def trees(self):
        return tuple(self._run("trees") or ())

    def export(self, target: Path, opset: int) -> Exported:
        target.write_bytes(b"ONNX %d" % opset)
        self._run("export", target=target)
        return Exported("fake 1.0", (TensorLink("y", "double", "line 3"),), ("Dropout",), ("be careful",))

    def close(self) -> None: ...


class CodeConverter:
    name, version = "Fake", "1.0"

    def open(self, source: Path, options: ConvertOptions) -> CodeModel:
        return CodeModel(source.read_text(), options)


def main(notes: tuple[str, ...]) -> None:
    serve.main(notes, lambda _: CodeConverter())


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def ends(pid: int) -> bool:
    """True once the process has ended, which its parent may learn a little later."""
    until = time.monotonic() + 20
    while alive(pid) and time.monotonic() < until:
        os.sched_yield()
    return not alive(pid)
