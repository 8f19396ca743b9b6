"""A model on a server, called from threads. One thread runs the connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from penstock.offloading.agreement import fitting
from penstock.perf.http_client import Address, HttpSession
from penstock.perf.oip_client import fetch_signature, infer_once
from penstock.tensor import Array, Signature

_MAX_BYTES = 256 << 20
"""Maximum bytes of an answer."""


class ServedModel:
    """The model ``name`` at ``address``. Call ``start`` before, and ``close`` after all calls."""

    def __init__(self, address: Address, name: str, timeout_s: float, expected: Signature | None = None) -> None:
        """Answers that do not fit the ``expected`` signature are errors, because the server need not be a friendly one."""
        self._expected = expected
        self.address = address
        self.name = name
        self._timeout_s = timeout_s
        self._idle: list[HttpSession] = []  # used by the loop's thread only
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-offload", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def infer(self, inputs: Mapping[str, Array]) -> Future[dict[str, Array]]:
        """Send a request. The future has the expected outputs, or a PenstockError; cancelling it closes the connection."""
        return asyncio.run_coroutine_threadsafe(self._infer(inputs), self._loop)

    def signature(self) -> Signature:
        """The signature that the server states. Raises Unavailable, NotFound, DeadlineExceeded, PenstockError."""
        fetched = fetch_signature(self.address, self.name, self._timeout_s)
        return asyncio.run_coroutine_threadsafe(fetched, self._loop).result()

    def close(self) -> None:
        """Cancel all requests and close all connections. Idempotent."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        session = self._idle.pop() if self._idle else HttpSession(self.address, self._timeout_s, _MAX_BYTES)
        try:
            outputs = await infer_once(session, self.address, self.name, inputs)
            if self._expected is not None:
                outputs = fitting(self._expected, outputs)
        except BaseException:
            session.close()
            raise
        self._idle.append(session)
        return outputs

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in self._idle:
            session.close()
