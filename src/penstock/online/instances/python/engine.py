"""The engine of models written in Python. A ``model.py`` follows Triton's Python backend, or uses Penstock's type hints.

A model's code can do anything to its process, so the server loads such models only in child processes.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.artifact import Artifact, Format
from penstock.engines.base import (
    Finding,
    Options,
    RequestModel,
    Severity,
    check_artifact,
    refuse_errors,
    typed_options,
)
from penstock.errors import InvalidModel
from penstock.online.instances.python.backend_utils import as_module
from penstock.online.instances.python.host import Host, StageTimes, here
from penstock.online.instances.python.module import import_model, model_errors, source_file
from penstock.online.instances.python.options import PythonOptions
from penstock.online.instances.python.triton_model import TritonModel
from penstock.online.instances.python.typed import is_marked
from penstock.online.instances.python.typed_model import Context, load_typed
from penstock.resources import Resources

_TRITON_MODULE = "triton_python_backend_utils"
_TRITON = "TritonPythonModel"
_FIXED_COST_BYTES = 64 << 20


class PythonEngine:
    """Runs ``model.py`` in this process. A process can load only one model, because loading changes global state."""

    name = "python"
    version = platform.python_version()
    formats = frozenset({Format.PYTHON})

    def __init__(self, host: Host | None = None) -> None:
        """``host`` gives the model access to the server."""
        self._host = host or Host()
        self.stages = StageTimes()
        """Count and duration of the loaded model's stages."""

    def gpus(self) -> int:
        return 0

    def validate(self, artifact: Artifact, options: Options) -> list[Finding]:
        typed = typed_options(self.name, options, PythonOptions)
        findings = check_artifact(artifact, self.formats)
        if "EXECUTION_ENV_PATH" in typed.parameters:
            message = "'EXECUTION_ENV_PATH' is not supported: models run with the server's Python"
            findings.append(
                Finding(Severity.ERROR, message, "remove it, and install the model's packages beside Penstock")
            )
        if b"\0" in artifact.data:
            return [*findings, Finding(Severity.ERROR, "model.py contains null bytes", "save it as UTF-8 text")]
        try:
            compile(artifact.data, source_file(artifact), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
            findings.append(
                Finding(Severity.ERROR, f"model.py is not valid Python: {line}{getattr(error, 'msg', error)}")
            )
        return findings

    def estimate(self, artifact: Artifact, options: Options) -> Resources:
        """The memory of the interpreter. The memory of the model itself is unknown before it runs."""
        return Resources(memory_bytes=_FIXED_COST_BYTES, cores=1)

    def load(self, artifact: Artifact, options: Options) -> RequestModel:
        typed = typed_options(self.name, options, PythonOptions)
        refuse_errors(self.validate(artifact, options))
        file = source_file(artifact)
        folder = Path(file).parent
        here.host, here.name, here.folder = self._host, typed.name, str(folder)
        here.waits_for_itself = typed.instances == 1
        if typed.threads:
            os.environ.setdefault("OMP_NUM_THREADS", str(typed.threads))
        sys.modules[_TRITON_MODULE] = as_module(_TRITON_MODULE)
        with model_errors(file, "while it was imported"):
            module = import_model(artifact)
        found = _find(module)
        with model_errors(file, "while it was loaded"):
            if isinstance(found, type) and found.__name__ == _TRITON:
                return TritonModel.load(found, typed, folder)
            return load_typed(found, typed, Context(typed, folder, self.stages))


def _find(module: ModuleType) -> Any:
    """The model in ``module``: a class or a function."""
    if _TRITON in vars(module):
        return vars(module)[_TRITON]
    marked = [value for value in vars(module).values() if is_marked(value) and value.__module__ == module.__name__]
    if len(marked) > 1:
        raise InvalidModel(f"model.py marks {len(marked)} models", "mark one function or class with @penstock.model")
    if not marked:
        raise InvalidModel(
            f"model.py has neither a class '{_TRITON}' nor a function or class marked with @penstock.model",
            "write @penstock.model above the model",
        )
    return marked[0]
