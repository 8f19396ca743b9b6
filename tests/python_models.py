"""Python models for tests: ``model.py`` files, and what loads them into real processes."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.online.instances.python.process import PythonProcess
from penstock.request import InferRequest

PATIENCE_S = 30

HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
"""

IDENTITY = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(one, "x").as_numpy())])
        for one in requests
    ]
"""


def config(max_batch: int = 8, **more: Any) -> dict[str, Any]:
    """``y`` like ``x``: rows of 2 FP32."""
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    return {
        "max_batch": max_batch,
        "config": {"input": [{"name": "x", **tensor}], "output": [{"name": "y", **tensor}], **more},
    }


def write(folder: Path, body: str, head: str = HEAD) -> Artifact:
    """``head`` and, indented if there is one, ``body`` as the ``model.py`` of version 1 in ``folder``."""
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    text = textwrap.dedent(body)
    (version / "model.py").write_text(head + textwrap.indent(text, "    ") if head else text)
    return Artifact.from_file(version / "model.py")


class Processes:
    """Loads models, and unloads them at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: list[PythonProcess] = []

    def load(
        self, body: str, options: Mapping[str, Any] | None = None, head: str = HEAD, timeout_s: float = 0.0
    ) -> PythonProcess:
        artifact = write(self._folder / str(len(self._models)), body, head)
        return self.load_file(artifact, config() if options is None else options, timeout_s)

    def load_file(self, artifact: Artifact, options: Mapping[str, Any], timeout_s: float = 0.0) -> PythonProcess:
        file = artifact.in_memory()
        try:
            model = PythonProcess.load("python", artifact, {"name": "m", **options}, file, timeout_s=timeout_s)
        finally:
            os.close(file)
        self._models.append(model)
        return model

    def end(self) -> None:
        for model in self._models:
            model.unload()


def request(*values: float, **more: Any) -> InferRequest:
    """One row ``x`` of two equal values for each of ``values``."""
    return InferRequest("m", {"x": np.array([[value, value] for value in values], np.float32)}, **more)


def ask(model: PythonProcess, requests: Sequence[InferRequest]) -> list[Any]:
    """The outcomes of a model that is not decoupled."""
    outcomes: list[Any] = [None] * len(requests)

    def answer(number: int, outcome: Any, final: bool) -> bool:
        if outcome is not None:
            assert final
            outcomes[number] = outcome
        return True

    model.execute(requests, answer)
    return outcomes


def failure(model: PythonProcess, requests: list[InferRequest]) -> str:
    """What the one request is told, or all are."""
    try:
        (outcome,) = ask(model, requests)
    except PenstockError as error:
        outcome = error
    assert isinstance(outcome, PenstockError)
    return outcome.message


class Answers:
    """Of one decoupled request; ``wanted`` is how many are."""

    def __init__(self, wanted: int = 1 << 30) -> None:
        self._wanted = wanted
        self._queue: SimpleQueue[tuple[Any, bool]] = SimpleQueue()
        self.count = 0

    def __call__(self, number: int, outcome: Any, final: bool) -> bool:
        if outcome is not None or final:
            self.count += outcome is not None
            self._queue.put((outcome, final))
        return self.count < self._wanted

    def all(self) -> list[Any]:
        outcomes = []
        while True:
            outcome, final = self._queue.get(timeout=PATIENCE_S)
            if outcome is not None:
                outcomes.append(outcome)
            if final or isinstance(outcome, PenstockError):
                return outcomes


def decoupled() -> dict[str, Any]:
    return config(model_transaction_policy={"decoupled": True})
