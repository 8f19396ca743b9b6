"""A split model: the head runs on this device, and the tail on a server."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from penstock import runtime
from penstock.errors import Cancelled
from penstock.offloading.server import ServedModel
from penstock.tensor import Array, Signature


class ServedTail:
    """Looks like the whole model on the server, but sends the output of ``head`` to ``tail``."""

    def __init__(self, head: runtime.Model, tail: ServedModel) -> None:
        self.name, self.address = tail.name, tail.address
        self._head, self._tail = head, tail
        self._worker = ThreadPoolExecutor(1, "penstock-offload-head")  # the head may not be reentrant

    def infer(self, inputs: Mapping[str, Array]) -> Future[dict[str, Array]]:
        """Run the head, and send its outputs. The future has the tail's outputs, or a PenstockError."""
        whole: Future[dict[str, Array]] = Future()
        self._worker.submit(self._run, dict(inputs), whole)
        return whole

    def signature(self) -> Signature:
        """The inputs of the head, and the outputs that the server states. Raises the errors of ``ServedModel.signature``."""
        return Signature(self._head.signature.inputs, self._tail.signature().outputs)

    def start(self) -> None:
        self._tail.start()

    def close(self) -> None:
        """Cancel all requests, and release the head. Idempotent."""
        self._worker.shutdown(cancel_futures=True)
        self._tail.close()
        self._head.close()

    def _run(self, inputs: Mapping[str, Array], whole: Future[dict[str, Array]]) -> None:
        try:
            part = self._tail.infer(self._head.infer(inputs))
        except Exception as error:  # noqa: BLE001 - the future carries every error
            if whole.set_running_or_notify_cancel():
                whole.set_exception(error)
            return
        whole.add_done_callback(lambda _: part.cancel())
        part.add_done_callback(partial(_passed_on, whole))


def _passed_on(whole: Future[dict[str, Array]], part: Future[dict[str, Array]]) -> None:
    """Give the outcome of ``part`` to ``whole``, unless that was cancelled. It is never running, so it can be cancelled until then."""
    if not whole.set_running_or_notify_cancel():
        return
    error = Cancelled("the request was cancelled") if part.cancelled() else part.exception()
    if error is not None:
        whole.set_exception(error)
    else:
        whole.set_result(part.result())
