"""The public names of ``penstock``, and the cost of importing it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import penstock

NAMES = [
    "BuildResult",
    "Context",
    "Contract",
    "Model",
    "PenstockError",
    "Recipe",
    "Tensor",
    "__version__",
    "build",
    "compress",
    "model",
    "open",
]


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


def test_importing_costs_nothing() -> None:
    imported = imported_by("import penstock")
    assert not imported & {"numpy", "onnx", "onnxruntime", "openvino", "typer", "rich", "msgspec"}
    assert {name for name in imported if name.startswith("penstock.")} == {"penstock.version"}


def test_opening_does_not_import_the_offline_half() -> None:
    imported = imported_by("import penstock; penstock.open")
    assert not imported & {"onnx", "onnx_ir", "onnxruntime", "openvino", "typer", "rich"}
    assert not [name for name in imported if name.startswith(("penstock.offline", "penstock.online"))]
