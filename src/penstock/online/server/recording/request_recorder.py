"""Records requests that later warm up their models. For each combination of input shapes, the first answered request is recorded."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from penstock.artifact import sha256
from penstock.online.repository.loading.recorded_requests import MAX_BYTES, SUFFIX, encode, folder_of
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.storage.atomic import write_whole
from penstock.telemetry.background_writer import BackgroundWriter
from penstock.tensor import Array


class RequestRecorder:
    """Records up to ``most`` requests, and up to ``MAX_BYTES``, per model version. Used only on the event loop."""

    def __init__(self, writer: BackgroundWriter[InferRequest], most: int) -> None:
        self._writer = writer
        self._most = most
        self._kept: dict[tuple[str, str], dict[Hashable, int]] = {}
        """For each model and version, the size of the recorded inputs, by their shapes."""

    def watch(self, request: InferRequest, done: Done) -> Done:
        """Wrap ``done`` so that ``request`` is recorded if it succeeds and its shapes are new."""
        kept = self._kept.setdefault((request.model_name, request.model_version), {})
        if len(kept) >= self._most:
            return done
        shapes = _shapes(request)
        if shapes in kept:
            return done

        def answered(outcome: Outcome) -> None:
            # Copy the inputs before calling ``done``, which may free them.
            if isinstance(outcome, InferResponse) and shapes not in kept and len(kept) < self._most:
                size = sum(map(_size, request.inputs.values()))
                if sum(kept.values()) + size <= MAX_BYTES:
                    kept[shapes] = size
                    inputs = {name: array.copy() for name, array in request.inputs.items()}
                    self._writer.put(InferRequest(request.model_name, inputs, parameters=request.parameters))
            done(outcome)

        return answered


def _shapes(request: InferRequest) -> Hashable:
    return tuple([(name, array.dtype.char, array.shape) for name, array in request.inputs.items()])


def _size(array: Array) -> int:
    return array.nbytes + (sum(map(len, array.flat)) if array.dtype.kind == "O" else 0)


class RequestFolder:
    """A ``Sink`` that writes requests below ``root``. Keeps the newest ``most`` requests of each model."""

    def __init__(self, root: str, most: int) -> None:
        self._root = root
        self._most = most

    def write(self, records: Sequence[InferRequest]) -> None:
        for request in records:
            folder = folder_of(self._root, request.model_name)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The name depends only on the shapes, so that a request from an earlier run with the same shapes is replaced.
            name = sha256(repr(_shapes(request)).encode())[:16] + SUFFIX
            write_whole(folder / name, encode(request), private=True)
            files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
            for path in files[: -self._most]:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing, because no file stays open."""
