"""The data plane: what a request goes through, whatever transport it came by."""

from __future__ import annotations

import logging

from penstock import __version__
from penstock.errors import PenstockError
from penstock.online.repository.manager import Repository
from penstock.request import Done, InferRequest, Outcome
from penstock.tensor import TensorSpec

_log = logging.getLogger(__name__)


class DataPlane:
    """Answers requests from the models in ``repository``. Belongs to the event loop."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.ready = False
        """Whether all models are loaded and the server is not shutting down; set by the composition root."""

    def infer(self, request: InferRequest, done: Done) -> None:
        """Have ``request`` answered; ``done`` is called exactly once, on the event loop, perhaps before this returns.

        A callback and no future: a task and a future per request would cost more than all the rest of this path.
        """
        try:
            handle = self._repository.acquire(request.model_name, request.model_version)
        except PenstockError as error:
            done(error)
            return

        def release(outcome: Outcome) -> None:
            handle.release()
            done(outcome)

        request.model_version = handle.version
        try:
            rows, key = handle.check(request)
            handle.scheduler.submit(request, rows, key, release)
        except PenstockError as error:
            release(error)
        except Exception:  # noqa: BLE001 - a bug of ours must not hold the model for ever
            _log.exception("request failed")
            release(PenstockError("internal error"))

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether the model can be asked now; of an unknown model False."""
        try:
            self._repository.find(name, version)
        except PenstockError:
            return False
        return True

    def server_metadata(self) -> dict[str, object]:
        """Name, version and the extensions of the protocol that are spoken."""
        return {"name": "penstock", "version": __version__, "extensions": ["binary_tensor_data"]}

    def model_metadata(self, name: str, version: str = "") -> dict[str, object]:
        """Versions served, platform, inputs and outputs. Raises NotFound."""
        handle = self._repository.find(name, version)
        return {
            "name": handle.name,
            "versions": self._repository.versions(name),
            "platform": handle.platform,
            "inputs": [_describe(spec) for spec in handle.signature.inputs],
            "outputs": [_describe(spec) for spec in handle.signature.outputs],
        }


def _describe(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype.value, "shape": spec.shape}
