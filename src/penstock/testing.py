"""Fakes and assertions for Penstock's own tests and for users' tests. With these fakes, tests need no monkeypatching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.artifact import Artifact, Format, sha256
from penstock.errors import AlreadyExists, Unavailable, Unsupported
from penstock.request import InferRequest
from penstock.resources import Resources
from penstock.storage.base import StorageEntry, check_contained, missing, too_large
from penstock.storage.local import LocalStorage
from penstock.tensor import Array, DataType, Signature, TensorSpec

Forward = Callable[[Mapping[str, Array]], dict[str, Array]]
Stream = Callable[[Mapping[str, Array]], Iterator[dict[str, Array]]]

DOUBLER = Signature(
    inputs=(TensorSpec("x", DataType.FP32, (-1, 2)),),
    outputs=(TensorSpec("y", DataType.FP32, (-1, 2)),),
)
"""The signature of the default fake model: ``y = 2 x``."""


def double(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {"y": inputs["x"] * 2}


class FakeModel:
    """A loaded model that runs ``forward``. ``calls`` contains the inputs of all calls, in order."""

    def __init__(
        self,
        signature: Signature = DOUBLER,
        forward: Forward = double,
        reentrant: bool = False,
        predictable: bool = False,
    ) -> None:
        self.signature = signature
        self.reentrant = reentrant
        self.predictable = predictable
        self.calls: list[dict[str, Array]] = []
        self.optional_inputs: tuple[TensorSpec, ...] = ()
        self.keeps_state = False
        self.unranked: frozenset[str] = frozenset()
        self.left_out: Mapping[str, str] = {}
        self.loaded = True
        self._forward = forward

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if not self.loaded:
            raise Unavailable("the model has been unloaded")
        self.calls.append(dict(inputs))
        return self._forward(inputs)

    def forward_within(self, inputs: Mapping[str, Array], limit_s: float) -> dict[str, Array]:
        return self.forward(inputs)

    def unload(self) -> None:
        self.loaded = False


def repeat(inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Yield one response per row of the input ``x``: the doubled row."""
    for row in inputs["x"]:
        yield {"y": row[None] * 2}


class FakeStreamingModel:
    """A decoupled ``RequestModel`` that runs ``stream``. ``calls`` contains the inputs of all calls. ``closed`` counts the iterators
    that were exhausted or closed early."""

    reentrant, decoupled, max_batch = False, True, None

    def __init__(self, signature: Signature = DOUBLER, stream: Stream = repeat) -> None:
        self.signature = signature
        self.calls: list[dict[str, Array]] = []
        self.closed = 0
        self.loaded = True
        self._stream = stream

    def execute(self, requests: Sequence[InferRequest], answer: Callable[[int, Any, bool], bool]) -> None:
        if not self.loaded:
            raise Unavailable("the model has been unloaded")
        (request,) = requests
        self.calls.append(dict(request.inputs))
        try:
            for outputs in self._stream(request.inputs):
                if not answer(0, outputs, False):
                    break
        finally:
            self.closed += 1
        answer(0, None, True)

    def unload(self) -> None:
        self.loaded = False


class FakeEngine:
    """An engine whose models are instances of ``FakeModel``. ``models`` contains all models that the engine has loaded."""

    name = "fake"
    version = "1"
    formats = frozenset(Format)

    def __init__(self, signature: Signature = DOUBLER, forward: Forward = double) -> None:
        self.models: list[FakeModel] = []
        self._signature, self._forward = signature, forward

    def gpus(self) -> int:
        return 0

    def validate(self, artifact: Artifact, options: Mapping[str, Any]) -> list[Any]:
        return []

    def estimate(self, artifact: Artifact, options: Mapping[str, Any]) -> Resources:
        return Resources(memory_bytes=artifact.size_bytes)

    def load(self, artifact: Artifact, options: Mapping[str, Any]) -> FakeModel:
        self.models.append(FakeModel(self._signature, self._forward))
        return self.models[-1]


class MemoryStorage:
    """A ``Storage`` in memory. ``localize`` copies into the folder ``scratch``."""

    def __init__(self, scratch: Path | None = None) -> None:
        self._files: dict[str, tuple[bytes, int]] = {}
        """For each path, its content and the number of earlier writes."""
        self._writes = 0
        self._scratch = scratch

    def list(self, folder: str = "") -> Sequence[StorageEntry]:
        prefix = f"{check_contained(folder)}/" if folder else ""
        entries: dict[str, StorageEntry] = {}
        for path, (data, number) in self._files.items():
            if path.startswith(prefix):
                name, slash, _ = path.removeprefix(prefix).partition("/")
                entries[name] = (
                    StorageEntry(name, is_folder=True) if slash else StorageEntry(name, False, len(data), str(number))
                )
        if folder and not entries:
            raise missing(folder)
        return [entries[name] for name in sorted(entries)]

    def read(self, path: str, most_bytes: int | None = None) -> bytes:
        if check_contained(path) not in self._files:
            raise missing(path)
        data = self._files[path][0]
        if most_bytes is not None and len(data) > most_bytes:
            raise too_large(path, most_bytes)
        return data

    def digest(self, path: str) -> str:
        return sha256(self.read(path))

    def write(self, path: str, data: bytes) -> None:
        self._files[check_contained(path)] = (bytes(data), self._writes)
        self._writes += 1

    def publish(self, folder: str, files: Mapping[str, bytes]) -> None:
        if self._below(check_contained(folder)):
            raise AlreadyExists(f"'{folder}' is already published", "publish under another name")
        for path in files:
            check_contained(path)
        for path, data in files.items():
            self.write(f"{folder}/{path}", data)

    def remove(self, path: str) -> None:
        for found in self._below(check_contained(path)):
            del self._files[found]

    def localize(self, path: str) -> Path:
        if self._scratch is None:
            raise Unsupported("this storage has no folder for local copies", "construct it with 'scratch'")
        copies = LocalStorage(self._scratch)
        for found in self._below(check_contained(path)):
            copies.write(found, self._files[found][0])
        return copies.localize(path)

    def _below(self, path: str) -> Sequence[str]:
        return [found for found in self._files if found == path or found.startswith(f"{path}/")]


def assert_tensors_close(
    actual: Mapping[str, Array], expected: Mapping[str, Array], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Assert equal names, datatypes and shapes. Floats must agree within tolerance, other elements exactly."""
    assert sorted(actual) == sorted(expected), f"names differ: {sorted(actual)} and {sorted(expected)}"
    for name, want in expected.items():
        got = actual[name]
        assert got.dtype == want.dtype, f"'{name}' is {got.dtype}, expected {want.dtype}"
        assert got.shape == want.shape, f"'{name}' has shape {got.shape}, expected {want.shape}"
        if DataType.from_numpy(want.dtype).is_float:
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol, atol, err_msg=f"'{name}'")
        else:
            np.testing.assert_array_equal(got, want, err_msg=f"'{name}'")
