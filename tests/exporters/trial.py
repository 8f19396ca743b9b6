"""Give one exported model to the commands, and judge how each ends.

A command either writes a model whose outputs on rows that it has not seen are near the original's, or refuses with a cause. The
judgement is independent of Penstock: both models run in plain ONNX Runtime, and ONNX Runtime's own quantiser is the standard.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime

from penstock import runtime
from penstock.cli.main import run
from penstock.tensor import Array
from tests.exporters.architecture import Architecture
from tests.exporters.export import fitting

_COUNT = 64
_FACTOR, _FLOOR = 2.0, 0.1
"""An INT8 model may have this many times the error of ONNX Runtime's quantiser, or this error."""
_OTHER = 0.25
"""The error on new rows beyond which a model that met its contract is a finding."""
_REFUSALS = {2: "refused", 4: "contract"}
_ONE_THREAD = ["--threads", "1"]


class Ending(msgspec.Struct):
    """How one command ended."""

    model: str
    command: str
    verdict: str
    """``ok``, ``refused``, ``contract``; any other is a finding."""
    error: float | None = None
    standard: float | None = None
    """The error of ONNX Runtime's own quantiser."""
    seconds: float = 0.0
    text: str = ""

    @property
    def is_finding(self) -> bool:
        return self.verdict not in ("ok", "not exported", *_REFUSALS.values())


class Trial:
    """One exported model, in a folder."""

    def __init__(self, name: str, architecture: Architecture, data: bytes, folder: Path) -> None:
        self.name, self._folder, self._number = name, folder, sum(map(ord, name))
        self.model = folder / "model.onnx"
        self.model.write_bytes(data)
        self._fitted, self._judged, self._fresh = (fitting(architecture.rows(_COUNT, seed), data) for seed in (1, 2, 3))
        np.savez(folder / "train.npz", **self._fitted)
        np.savez(folder / "test.npz", **self._judged)
        self._want = outputs(self.model.read_bytes(), self._fresh)
        self._size = _batch(self.model)

    def quantize(self) -> Ending:
        placement = ("linear", "wide")[self._number % 2]
        method = [] if self._number % 8 == 0 else ["--method", "mse", *(["--no-equalize"] if self._number % 4 else [])]
        options = [
            *method,
            "--placement",
            placement,
            "--budget",
            "0.1s",
            "--evaluate",
            "test.npz",
            "--calibrate",
            "train.npz",
        ]
        ending = self._command("quantize", *options)
        if ending.error is not None:
            ending.standard = self._standard()
            if ending.error > max(_FACTOR * (ending.standard if ending.standard is not None else _OTHER), _FLOOR):
                ending.verdict = "inaccurate"
        return ending

    def narrow(self) -> Ending:
        """One of the methods that need no ranges."""
        options = [
            ["--precision", "int8-dynamic", "--calibrate", "train.npz"],
            ["--precision", "int8-weights"],
            ["--precision", "fp16-weights"],
            ["--precision", "bf16-weights"],
        ][self._number % 4]
        return self._near(self._command("quantize", *options))

    def prune(self) -> Ending:
        """One of the methods that need no training; how far the outputs change is the user's choice."""
        command, options = [
            ("prune", ["--sparsity", "50%"]),
            ("share", ["--bits", "6", "--conv-bits", "8"]),
            ("prune-channels", ["--width", "75%", "--block", "4"]),
            ("low-rank", ["--max-error", "10%", "--train", "train.npz"]),
        ][self._number // 4 % 4]
        return self._command(command, *options)

    def build(self) -> Ending:
        options = ["--calibrate", "train.npz", "--evaluate", "test.npz", "--method", "mse", "--budget", "10s"]
        return self._near(self._command("build", *options, *_ONE_THREAD, written="made.bundle"))

    def compress(self) -> Ending:
        options = ["--train", "train.npz", "--evaluate", "test.npz", "--budget", "3s", "--epochs", "1"]
        return self._near(self._command("compress", *options, *_ONE_THREAD, written="compressed.bundle"))

    def _near(self, ending: Ending) -> Ending:
        if ending.error is not None and ending.error > _OTHER:
            ending.verdict = "inaccurate"
        return ending

    def _command(self, command: str, *options: str, written: str = "made.onnx") -> Ending:
        started, path = time.perf_counter(), self._folder / written
        given = [str(self._folder / option) if option.endswith(".npz") else option for option in options]
        code, out, err = called([command, str(self.model), *given, "-o", str(path), "--force", "--json"])
        ending = Ending(self.name, " ".join([command, *options]), "ok", seconds=time.perf_counter() - started)
        if code == 0:
            ending.text = " | ".join(json.loads(out.splitlines()[-1]).get("notes", []))[:500]
            self._judge(ending, path)
        else:
            ending.text = next((line for line in err.splitlines() if line.startswith("error:")), err[-1500:])
            ending.verdict = _REFUSALS.get(code, f"exit code {code}")
        if "Traceback" in err or "internal error" in err:
            ending.verdict, ending.text = "traceback", err[-1500:]
        return ending

    def _judge(self, ending: Ending, path: Path) -> None:
        if not path.exists():
            ending.verdict = "nothing written"
            return
        try:
            if path.suffix == ".onnx":
                got = outputs(path.read_bytes(), self._fresh)
            else:
                with runtime.open(path) as bundle:
                    got = in_calls(bundle.infer, self._fresh, self._size)
        except Exception as error:  # noqa: BLE001 - whatever the runtime raises
            ending.verdict, ending.text = "does not run", f"{type(error).__name__}: {error}"
            return
        if wrong := [name for name, array in self._want.items() if name not in got or got[name].shape != array.shape]:
            ending.verdict, ending.text = "wrong outputs", f"{wrong}"
            return
        ending.error = distance(self._want, got)

    def _standard(self) -> float | None:
        try:
            made = by_default(self.model, self._fitted, self._folder)
            return distance(self._want, outputs(made.read_bytes(), self._fresh))
        except Exception:  # noqa: BLE001 - it does not take every model
            return None


def called(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, run in this process as the console script runs it."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["penstock", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - a finding
        code = 1
        err.write(traceback.format_exc())
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


def outputs(data: bytes, rows: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a model in plain ONNX Runtime, in calls of the size that it takes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs() if value.type.startswith("tensor")]
    first = session.get_inputs()[0].shape[0]
    size = first if isinstance(first, int) else len(next(iter(rows.values())))
    count = len(next(iter(rows.values())))
    return in_calls(lambda part: dict(zip(names, session.run(names, part), strict=True)), rows, min(size, count))


def in_calls(
    forward: Callable[[dict[str, Array]], Mapping[str, Array]], rows: Mapping[str, Array], size: int
) -> dict[str, Array]:
    """The outputs of all rows, in calls of ``size`` rows."""
    count = len(next(iter(rows.values())))
    parts = [forward({name: array[at : at + size] for name, array in rows.items()}) for at in range(0, count, size)]
    return {name: np.concatenate([np.atleast_1d(part[name]) for part in parts]) for name in parts[0]}


def distance(want: Mapping[str, Array], got: Mapping[str, Array]) -> float:
    """The norm of the difference of the worst float output, divided by the output's norm; classes may differ."""
    worst = 0.0
    for name, array in want.items():
        if array.dtype.kind == "f":
            a, b = array.astype(np.float64), got[name].astype(np.float64)
            finite = np.isfinite(a)
            if not np.array_equal(finite, np.isfinite(b)):
                return float("inf")
            worst = max(worst, float(np.linalg.norm(a[finite] - b[finite]) / max(np.linalg.norm(a[finite]), 1e-9)))
    return worst


def by_default(model: Path, fitted: Mapping[str, Array], folder: Path) -> Path:
    """The model of ONNX Runtime's quantiser: QDQ, one scale per channel of weights, ranges by minimum and maximum."""
    import logging

    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    size = _batch(model)

    class Rows(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            starts = range(0, _COUNT, size)
            self._parts = iter([{name: array[at : at + size] for name, array in fitted.items()} for at in starts])

        def get_next(self) -> Any:
            return next(self._parts, None)

    prepared, made = folder / "prepared.onnx", folder / "standard.onnx"
    logging.disable(logging.WARNING)
    try:
        quant_pre_process(model, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared, made, Rows(), per_channel=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8
        )
    finally:
        logging.disable(logging.NOTSET)
    return made


def _batch(model: Path) -> int:
    graph = onnx.load(str(model), load_external_data=False).graph
    initial = {tensor.name for tensor in graph.initializer}
    first = next(value for value in graph.input if value.name not in initial).type.tensor_type.shape.dim[0]
    return first.dim_value or 16


STEPS: dict[str, Callable[[Trial], Ending]] = {
    "quantize": Trial.quantize,
    "narrow": Trial.narrow,
    "prune": Trial.prune,
    "build": Trial.build,
    "compress": Trial.compress,
}
