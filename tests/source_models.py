"""Sources of conversions that are ONNX models themselves, and may be exported wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.offline.convert.base import Axis, Exported, TensorLink
from penstock.tensor import Array, Signature


class OnnxSource:
    """A ``FrameworkModel`` that runs ``artifact`` and exports ``exported``."""

    def __init__(self, artifact: Artifact, exported: Artifact | Callable[[], Artifact] | None = None) -> None:
        self._model = get_engine("onnxruntime").load(artifact, {"threads": 1})
        self._exported = exported or artifact
        self.signature: Signature = self._model.signature
        self.axes: Mapping[str, tuple[Axis, ...]] = {
            spec.name: tuple(Axis(at, f"axis_{at}") for at, size in enumerate(spec.shape) if size < 0)
            for spec in self.signature.inputs
        }
        self.closed = False

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._model.forward(inputs)

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        return {name: array for name, array in self.forward(inputs).items() if name in names}

    def export(self, target: Path, opset: int) -> Exported:
        made = self._exported if isinstance(self._exported, Artifact) else self._exported()
        for path, data in made.files().items():
            (target if path == made.file_name else target.parent / path).write_bytes(data)
        links = tuple(TensorLink(name, name, "layer of the test") for name in self.signature.output_names)
        return Exported("test 1.0", links, warnings=("a warning of the exporter",))

    def close(self) -> None:
        self.closed = True
