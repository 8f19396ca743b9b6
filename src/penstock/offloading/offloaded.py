"""A model that runs on this device or on a server, whichever answers earlier."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import CancelledError as FutureCancelled
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from penstock import runtime
from penstock.errors import InvalidArgument, PenstockError, Unsupported, WrongResult, prefixed
from penstock.offloading.agreement import check_equal, check_same
from penstock.offloading.choice import Plan, Side
from penstock.offloading.device import battery_share, free_memory
from penstock.offloading.served_tail import ServedTail
from penstock.offloading.server import ServedModel
from penstock.offloading.side_choice import SideChoice
from penstock.perf.http_client import Address
from penstock.tensor import Array, Signature, to_wire

_log = logging.getLogger(__name__)
Outputs = dict[str, Array]


class OffloadOptions(msgspec.Struct, frozen=True):
    """When a model leaves the device."""

    low_battery: float = 0.2
    """Spare the device while it discharges and has less than this share of its charge."""
    low_memory: int = 0
    """Spare the device while less memory than this is free, in bytes."""
    tolerance: float = 0.01
    """Largest difference between the answers of both sides, as a share of the largest value of the output."""
    timeout_s: float = 10.0
    """Time after which a request to the server fails."""


class Counts(msgspec.Struct):
    """What happened so far."""

    device: int = 0
    """Calls that the device answered."""
    server: int = 0
    """Calls that the server answered."""
    fallbacks: int = 0
    """Calls that the device answered because the server failed or was late."""
    probes: int = 0
    """Calls that both sides ran, to measure the side that did not answer and to compare the answers."""


class OffloadedModel:
    """A model on both sides; also a context manager. Thread-safe.

    An answer never waits for a measurement: the side that does not answer is measured in the background, for about 5 % of the time.
    These calls also compare the answers. If they differ by more than the tolerance, the server is not used again, because it runs
    another model.
    """

    def __init__(
        self,
        device: runtime.Model,
        server: ServedModel | ServedTail,
        options: OffloadOptions,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._device, self._server, self._options, self._now = device, server, options, now
        self._choice = SideChoice()
        self._is_checked = False
        """True after the server's signature was compared."""
        self._state = threading.Lock()  # of the counts and the choice
        self._device_turn = threading.Lock()  # a model may not be reentrant
        self._workers = ThreadPoolExecutor(2, "penstock-offload-device")
        self._probing = threading.Semaphore(1)

    @property
    def signature(self) -> Signature:
        return self._device.signature

    @property
    def server_error(self) -> str:
        """Why the server is not used now; empty if it is."""
        return self._choice.server_error

    def infer(self, inputs: Mapping[str, Array], deadline_ms: float | None = None) -> Outputs:
        """Run once. The deadline only decides the side; a late answer is still returned.

        Raises InvalidArgument if ``inputs`` do not fit. Errors of the server are never raised, because the device answers instead.
        """
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        size = _bytes(arrays)
        plan = self._plan(size, deadline_ms)
        if plan.first is Side.SERVER:
            return self._from_server(arrays, size, plan)
        probe = self._probe(Side.SERVER, arrays, size)
        try:
            outputs = self._on_device(arrays, size)
        except InvalidArgument:
            raise
        except PenstockError:
            if self.server_error:
                raise
            return self._server.infer(arrays).result()
        self._count("device")
        if probe is not None:
            probe.add_done_callback(partial(self._compared, outputs))
        return outputs

    def predicted_ms(self, inputs: Mapping[str, Array]) -> dict[str, float | None]:
        """The predicted time of a call with ``inputs`` on each side, in milliseconds; None if it was never measured."""
        size = _bytes({name: np.asarray(array) for name, array in inputs.items()})
        with self._state:
            found = self._choice.predicted(size)
        return {side.value: None if one is None else one * 1e3 for side, one in zip(Side, found, strict=True)}

    def close(self) -> None:
        """Cancel background calls and release the model. Idempotent."""
        self._workers.shutdown(cancel_futures=True)
        self._server.close()
        self._device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _plan(self, size: int, deadline_ms: float | None) -> Plan:
        options = self._options
        battery, memory = battery_share(), free_memory() if options.low_memory else None
        spare = (battery is not None and battery < options.low_battery) or (
            memory is not None and memory < options.low_memory
        )
        with self._state:
            return self._choice.plan(size, None if deadline_ms is None else deadline_ms / 1e3, spare)

    def _from_server(self, arrays: dict[str, Array], size: int, plan: Plan) -> Outputs:
        """The server's answer, or the device's if the server fails, or is late and the device is earlier."""
        start = self._now()
        answer = self._ask(arrays, size)
        done, _ = wait([answer], plan.device_after_s)
        if done and answer.exception() is None:
            self._count("server")
            outputs = answer.result()
            if (probe := self._probe(Side.DEVICE, arrays, size)) is not None:
                probe.add_done_callback(partial(self._compared, outputs))
            return outputs
        if done:
            outputs = self._on_device(arrays, size)
            if isinstance(error := answer.exception(), InvalidArgument):
                self._refuse(error, forever=False)  # the device accepts these inputs
        else:
            own = self._workers.submit(self._on_device, arrays, size)
            done, _ = wait([answer, own], return_when=FIRST_COMPLETED)
            if answer in done and answer.exception() is None:
                self._count("server")
                return answer.result()
            try:
                outputs = own.result()
            except PenstockError as error:
                if isinstance(error, InvalidArgument) or answer.exception() is not None:
                    raise
                self._count("server")  # late, but the only answer
                return answer.result()
            if not answer.done():
                # A link that hangs has no measured time, so the time so far counts.
                self._measured(Side.SERVER, size, self._now() - start)
                answer.cancel()
        self._count("device")
        self._count("fallbacks")
        return outputs

    def _on_device(self, arrays: Mapping[str, Array], size: int) -> Outputs:
        with self._device_turn:
            start = self._now()
            outputs = self._device.infer(arrays)
            self._measured(Side.DEVICE, size, self._now() - start)
        return outputs

    def _ask(self, arrays: Mapping[str, Array], size: int) -> Future[Outputs]:
        start = self._now()
        with self._state:
            self._choice.started(Side.SERVER, start)
        answer = self._server.infer(arrays)
        answer.add_done_callback(partial(self._asked, size, start))
        return answer

    def _asked(self, size: int, start: float, answer: Future[Outputs]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if error is None:
            self._measured(Side.SERVER, size, self._now() - start)
            with self._state:
                self._choice.answered()
        elif not isinstance(error, InvalidArgument):
            with self._state:
                self._choice.failed(str(error), self._now())

    def _measured(self, side: Side, size: int, seconds: float) -> None:
        with self._state:
            self._choice.measured(side, size, seconds, self._now())

    def _probe(self, side: Side, arrays: dict[str, Array], size: int) -> Future[Outputs] | None:
        """Start a call in the background, if one is due."""
        now = self._now()
        with self._state:
            due = self._choice.is_probe_due(side, now)
        if not due or not self._probing.acquire(blocking=False):
            return None
        self._count("probes")
        copies = {name: array.copy() for name, array in arrays.items()}  # the caller may reuse its arrays
        probe = (
            self._workers.submit(self._on_device, copies, size)
            if side is Side.DEVICE
            else self._workers.submit(self._probe_server, copies, size)
        )
        probe.add_done_callback(lambda _: self._probing.release())
        return probe

    def _probe_server(self, arrays: dict[str, Array], size: int) -> Outputs:
        if not self._is_checked:
            try:
                check_same(self.signature, self._server.signature(), self._server.name)
            except PenstockError as error:
                self._refuse(error, forever=isinstance(error, InvalidArgument))
                raise
            self._is_checked = True
        return self._ask(arrays, size).result()

    def _compared(self, outputs: Outputs, other: Future[Outputs]) -> None:
        """Compare the answer of a probe with the answer that was returned."""
        try:
            found = other.result()
        except (PenstockError, FutureCancelled) as error:
            _log.info("a call in the background failed: %s", error)
            return
        try:
            check_equal(outputs, found, self._options.tolerance)
        except WrongResult as error:
            self._refuse(error, forever=True)

    def _refuse(self, error: PenstockError, *, forever: bool) -> None:
        with self._state:
            self._choice.failed(str(error), self._now(), forever=forever)
        _log.warning("the server at %s is not used: %s", self._server.address.url, error)

    def _count(self, what: str) -> None:
        with self._state:
            setattr(self.counts, what, getattr(self.counts, what) + 1)


def _bytes(arrays: Mapping[str, Array]) -> int:
    """The bytes of ``arrays`` on the wire. Only text must be encoded to know them."""
    return sum(len(to_wire(array)) if array.dtype.kind in "OSU" else array.nbytes for array in arrays.values())


def offload(
    path: str | Path,
    url: str,
    *,
    model: str = "",
    key: str = "",
    ca: Path | None = None,
    head: str | Path | None = None,
    options: OffloadOptions | None = None,
) -> OffloadedModel:
    """Open the bundle or model at ``path``, and use the model of the same name on the server at ``url`` where that is better.

    ``model`` is the name on the server, by default the bundle's. ``key`` is the server's API key, ``ca`` a PEM file with its
    certificate. With ``head``, calls are split: this head of the model runs on the device, and ``model``, by default ``tail``, on the
    server (see ``penstock split``). An unreachable server is no error: the device answers, and the server is tried again later.

    Raises the errors of ``penstock.open``, InvalidArgument for a wrong URL, and Unsupported for a pipeline.
    """
    options = options or OffloadOptions()
    address = Address.parse(url, ca, key)
    try:
        device = runtime.open(path)
    except PenstockError as error:
        raise prefixed("offloading needs the model on this device too: ", error) from None
    if isinstance(device, runtime.Pipeline):
        device.close()
        raise Unsupported(f"'{path}' is a pipeline, but offloading runs models", "offload the model of the pipeline")
    name = model or ("tail" if head else device.name)
    server: ServedModel | ServedTail = ServedModel(address, name, options.timeout_s, device.signature)
    if head is not None and isinstance(server, ServedModel):
        server = ServedTail(runtime.open(head), server)
    server.start()
    return OffloadedModel(device, server, options)
