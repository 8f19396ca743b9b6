"""A model in the calling process, without a server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from penstock.artifact import Artifact, Format
from penstock.bundle.local import NO_LIMITS, DeviceLimits, load_variant
from penstock.bundle.manifest import Manifest, Variant
from penstock.bundle.open import Bundle, open_model
from penstock.engines.base import LoadedModel
from penstock.engines.registry import engines_for, get_engine
from penstock.errors import InvalidArgument, Unsupported, quoted
from penstock.rows.proof import coupling
from penstock.tensor import Array, Signature

MODELS = tuple(format for format in Format if engines_for(format))
"""The formats of the models that ``open`` runs. Python models need a server."""
_MAX_BATCH = 32
"""Rows per call of a model without a bundle, if its rows are proven to be independent."""


class Model:
    """A loaded model; also a context manager. Only one thread may use it at a time, unless its engine is reentrant."""

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        variant: Variant | None = None,
        manifest: Manifest | None = None,
        max_batch: int = _MAX_BATCH,
        coupling: str = "",
    ) -> None:
        self.name = name
        self.coupling = coupling
        """Why rows may depend on each other, so that they are run one by one; empty otherwise."""
        self.variant = variant
        """The running variant; None for a model file."""
        self.manifest = manifest
        self._loaded = loaded
        self._max_batch = manifest.serving.max_batch if manifest else max_batch

    @classmethod
    def open(cls, path: str | Path, *, threads: int = 0, max_memory: int = 0, power_saving: bool = False) -> Model:
        """Open the bundle of a model, or a model file. Raises the errors of ``penstock.open``, and Unsupported for a pipeline."""
        opened = open_model(path)
        if isinstance(opened, Artifact):
            return load_file(opened, Path(path))
        return load_bundle(opened, DeviceLimits(threads, max_memory, power_saving))

    @property
    def signature(self) -> Signature:
        return self._loaded.signature

    def __call__(self, *given: Array, **named: Array) -> dict[str, Array]:
        """Like ``infer``. Inputs are given in the order of the signature, or by name."""
        names = self.signature.input_names
        if len(given) > len(names):
            raise InvalidArgument(f"{len(given)} inputs are given, but the model has {len(names)}")
        return self.infer({**dict(zip(names, given, strict=False)), **named})

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run once on ``inputs`` (name -> array). Raises InvalidArgument if ``inputs`` do not fit ``signature``.

        Inputs for which the model has a default value may be omitted.
        """
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        optional = {spec.name: spec for spec in self._loaded.optional_inputs if spec.name in arrays}
        for name, spec in optional.items():
            spec.check(arrays[name])
        required = {name: array for name, array in arrays.items() if name not in optional}
        self._shaped(required).check(required)
        return self._loaded.forward(arrays)

    def infer_rows(self, inputs: Mapping[str, Array], batch: int | None = None) -> dict[str, Array]:
        """Run inference on any number of rows, ``batch`` rows per call.

        ``batch`` defaults to the size for which the bundle was tuned. For a model file, the default is 32, or to 1 if the model's rows
        are not proven to be independent. Outputs are joined along their batch axis. An output without a batch axis is returned once if
        all calls give the same value; otherwise the values of all calls are stacked.
        """
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        if optional := sorted(arrays.keys() & {spec.name for spec in self._loaded.optional_inputs}):
            raise InvalidArgument(
                f"inputs {optional} have a default value in the model and cannot be split into rows", "use `infer`"
            )
        counts = {len(array) for array in arrays.values() if array.ndim}
        if len(counts) != 1:
            raise InvalidArgument(f"inputs differ in number of rows: { {n: a.shape for n, a in arrays.items()} }")
        size = self.rows_per_call(batch)
        total = counts.pop()
        return self.infer_calls(
            ({name: array[start : start + size] for name, array in arrays.items()}, min(size, total - start))
            for start in range(0, total, size)
        )

    def infer_calls(self, calls: Iterable[tuple[Mapping[str, Array], int]]) -> dict[str, Array]:
        """Run ``calls``, given as inputs and number of rows, and join the outputs as ``infer_rows`` does."""
        parts, rows = [], []
        for inputs, count in calls:
            parts.append(self.infer(inputs))
            rows.append(count)
        if not parts:
            raise InvalidArgument("there are no rows to infer", "give at least one row")
        return {name: self._joined(name, [part[name] for part in parts], rows) for name in parts[0]}

    def rows_per_call(self, batch: int | None = None) -> int:
        """The number of rows that ``infer_rows`` gives to each call, if ``batch`` rows are asked for."""
        if not self.signature.batchable:
            return self.signature.smallest_batch
        return batch or self._max_batch

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._loaded.unload()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shaped(self, inputs: Mapping[str, Array]) -> Signature:
        """The signature, in which inputs of unknown rank get the shapes of the given ``inputs``."""
        unranked = self._loaded.unranked & inputs.keys()
        if not unranked:
            return self.signature
        specs = [
            msgspec.structs.replace(spec, shape=inputs[spec.name].shape) if spec.name in unranked else spec
            for spec in self.signature.inputs
        ]
        return Signature(tuple(specs), self.signature.outputs)

    def _joined(self, name: str, parts: list[Array], rows: list[int]) -> Array:
        """The output ``name`` of all calls, joined. ``rows`` has the number of rows of each call."""
        axis = row_axis(self.signature, name, parts, rows)
        if axis is not None:
            return np.concatenate(parts, axis)
        has_free_rows = all(spec.shape[:1] == (-1,) for spec in self.signature.inputs)
        is_shared = has_free_rows or rows[0] > 1
        # If the batch is fixed at one row, every output belongs to its call's row, even if all values are equal.
        same = is_shared and all(np.array_equal(part, parts[0], equal_nan=_may_be_nan(part)) for part in parts[1:])
        if not same and len({part.shape for part in parts}) > 1:
            raise InvalidArgument(
                f"output {quoted(name)} has no axis of rows, and its shape differs from call to call",
                "call `infer` for each row",
            )
        return parts[0] if same else np.stack(parts)


def row_axis(signature: Signature, name: str, parts: Sequence[Array], rows: Sequence[int]) -> int | None:
    """The first axis of output ``name`` whose size is the number of rows in every call; None if there is none.

    If the inputs have a fixed number of rows, only the output's first axis qualifies. If the number is free, only free axes of the
    output qualify.
    """
    shape = next((spec.shape for spec in signature.outputs if spec.name == name), ())
    axes = list(range(parts[0].ndim))
    if any(spec.shape[:1] != (-1,) for spec in signature.inputs):
        axes = axes[:1]
    elif len(shape) == parts[0].ndim:
        axes = [axis for axis in axes if shape[axis] == -1]
    sizes = [part.shape for part in parts]
    return next((at for at in axes if all(size[at] == count for size, count in zip(sizes, rows, strict=True))), None)


def _may_be_nan(array: Array) -> bool:
    return array.dtype.kind in "fc"


def load_file(artifact: Artifact, path: Path) -> Model:
    """The model file or folder at ``path`` with the default engine of its format. Raises Unsupported, InvalidModel."""
    engines = engines_for(artifact.format)
    if not engines:
        raise Unsupported("a Python model runs only in a server", f"run it with `penstock serve {path}`")
    loaded = get_engine(engines[0]).load(artifact, {})
    reason = coupling(artifact, loaded.signature)
    return Model(path.stem, loaded, max_batch=1 if reason else _MAX_BATCH, coupling=reason)


def load_bundle(bundle: Bundle, limits: DeviceLimits = NO_LIMITS) -> Model:
    """The model of ``bundle`` with the engine of its tuned variant. Raises the errors of ``load_variant``."""
    one = load_variant(bundle, limits)
    is_single = bundle.manifest.serving.max_batch == 1
    reason = coupling(bundle.artifact(one.variant), one.loaded.signature) if is_single else ""
    return Model(bundle.name, one.loaded, one.variant, bundle.manifest, coupling=reason)
