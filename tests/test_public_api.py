"""The public names of ``penstock``, and the cost of importing it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock
from penstock.cli.help import FOLDERS

NAMES = [
    "Artifact",
    "BuildResult",
    "CandidateRecord",
    "Certificate",
    "Compression",
    "Context",
    "Contract",
    "Conversion",
    "Model",
    "OffloadOptions",
    "OffloadedModel",
    "Outcome",
    "PenstockError",
    "Pipeline",
    "RangeMethod",
    "Recipe",
    "Tensor",
    "__version__",
    "build",
    "compress",
    "convert",
    "model",
    "offload",
    "open",
    "register_op",
]


PROGRAM = """
from pathlib import Path
from typing import Annotated, assert_type

import numpy as np
import numpy.typing as npt

import penstock
from penstock import (
    Artifact, BuildResult, CandidateRecord, Certificate, Compression, Context, Contract, Conversion, Model, OffloadedModel,
    OffloadOptions, Outcome, PenstockError, Pipeline, RangeMethod, Recipe, Tensor
)
from penstock.bundle.titles import outcome, title, verdict
from penstock.clock import ManualClock
from penstock.errors import ContractUnmet, InvalidInput
from penstock.testing import FakeEngine, assert_tensors_close

X = np.zeros((8, 3), np.float32)


def build(folder: Path) -> str:
    compression = Compression(budget_s=60.0, folder=folder / "plan")
    recipe = Recipe(Contract(max_accuracy_loss=0.01, p99_ms=5.0), methods=(RangeMethod.MSE,), compression=compression)
    try:
        result = penstock.build(folder / "m.onnx", folder / "m.bundle", calibrate={"x": X}, evaluate="e.npz", recipe=recipe)
    except ContractUnmet as error:
        return error.hint
    except PenstockError as error:
        return f"{error.code.value} {error.message}"
    assert_type(result, BuildResult)
    record: CandidateRecord = result.chosen
    speed = record.speedup.value if record.speedup is not None else 1.0
    return f"{title(record)}, {outcome(record)}, {verdict(record)}, {speed:.2f}, {result.bundle.name}"


def run(path: Path) -> dict[str, tuple[int, ...]]:
    with Model.open(path) as model:
        assert_type(model, Model)
        shapes = {spec.name: spec.shape for spec in model.signature.inputs}
        try:
            model.infer({"x": X})
        except InvalidInput:
            return shapes
        return {name: array.shape for name, array in model.infer_rows({"x": X}, batch=4).items()}


def read(path: Path) -> object:
    with Pipeline.open(path, threads=1, power_saving=True) as pipeline:
        assert_type(pipeline, Pipeline)
        for answer in pipeline.stream(["a.jpg", "b.jpg"]):
            print(answer)
        return pipeline("photo.jpg")["label"]


def compress(model: Artifact) -> list[str]:
    found = penstock.compress.quantize(model, {"x": X}, evaluate="e.npz", output=Path("q.onnx"), method="mse")
    assert_type(found, Outcome)
    again = penstock.compress.prune(found.model, sparsity=0.5, on_progress=lambda stage, done, total: None)
    return [*found.notes, *again.notes]


def convert(net: object) -> bool:
    done = penstock.convert(net, "net.onnx", sample={"x": X}, dynamic={"x": {0: "batch"}}, opset=21)
    assert_type(done, Conversion)
    certificate: Certificate | None = done.certificate
    return certificate is not None and certificate.holds


Rows = Annotated[npt.NDArray[np.float32], Tensor("FP32", -1, 4)]


@penstock.model
def halve(x: Rows, context: Context) -> Rows:
    with context.stage("halve"):
        return x / np.float32(2)


def test() -> None:
    engine, clock = FakeEngine(), ManualClock()
    clock.advance(1.0)
    assert_tensors_close(engine.load(Artifact.from_bytes(b""), {}).forward({"x": X}), {"y": 2 * X})


penstock.opne("m.onnx")  # type: ignore[attr-defined]
penstock.convert("m.pt", samples="x.npz")  # type: ignore[call-arg]
penstock.compress.quantise("m.onnx")  # type: ignore[attr-defined]
Recipe(contracts=Contract())  # type: ignore[call-arg]
Contract(p99_ms="5ms")  # type: ignore[arg-type]
penstock.compress.prune(3)  # type: ignore[arg-type]
"""
"""A user's program with the documented types. Each line with a comment is a mistake that the type checker must find."""


def imported_by(code: str) -> set[str]:
    """The top-level packages and Penstock's modules that ``code`` imports in a fresh interpreter."""
    listing = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True, timeout=60)
    modules = done.stdout.splitlines()[-1].split()
    return {name for name in modules if "." not in name or name.startswith("penstock.")}


def test_the_names_are_these() -> None:
    assert penstock.__all__ == NAMES
    assert dir(penstock) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(penstock, name)
    assert isinstance(value, str) or inspect.getdoc(value)


def test_unknown_names_are_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'tensorrt'"):
        _ = penstock.tensorrt


def test_the_metadata_of_the_package_are_complete() -> None:
    root = Path(__file__).parents[1]
    found = tomllib.loads((root / "pyproject.toml").read_text())
    project = found["project"]
    assert (root / project["readme"]).is_file()
    assert all((root / name).is_file() for name in project["license-files"])
    assert project["license"] == "Apache-2.0"
    for start in (
        "Development Status",
        "Environment",
        "Intended Audience",
        "Operating System",
        "Topic",
        "Typing :: Typed",
    ):
        assert any(classifier.startswith(start) for classifier in project["classifiers"])
    pages = found["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert pages == {f"docs/{folder}": f"penstock/docs/{folder}" for folder in sorted(FOLDERS)}
    assert all((root / page).is_dir() for page in pages)


def test_importing_costs_nothing() -> None:
    imported = imported_by("import penstock")
    assert not imported & {"numpy", "onnx", "onnxruntime", "openvino", "typer", "rich", "msgspec"}
    assert {name for name in imported if name.startswith("penstock.")} == {"penstock.version"}


def test_opening_does_not_import_the_offline_half() -> None:
    imported = imported_by("import penstock; penstock.open")
    assert not imported & {
        "onnx",
        "onnx_ir",
        "onnxruntime",
        "openvino",
        "typer",
        "rich",
        "yaml",
        "cv2",
        "PIL",
        "orjson",
    }
    unwanted = ("penstock.offline", "penstock.online", "penstock.cli", "penstock.perf", "penstock.samples")
    assert not [name for name in imported if name.startswith(unwanted)]


def test_opening_costs_little_beyond_the_engine(tmp_path: Path) -> None:
    program = "import numpy, onnxruntime, time; began = time.process_time(); import penstock; penstock.open; "
    program += "print(time.process_time() - began)"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", program]
    seconds = [
        float(subprocess.check_output(command, env=environment, text=True)) for _ in range(3)
    ]  # the first compiles
    assert min(seconds) < 0.15


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_users_program_passes_a_strict_type_checker(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout
