from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from handles import make_handle
from penstock.errors import Cancelled, InvalidArgument, PenstockError
from penstock.online.scheduler.base import Cancellable
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.shared_memory.arrivals import Arrivals
from penstock.online.server.shared_memory.lease import Lease
from penstock.request import InferRequest
from penstock.testing import FakeModel


class GatedLease(Lease):
    """Reads one large input once ``gate`` is set; then raises ``error``, if any."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(lambda _: pytest.fail("no region is needed"), ByteBudget(0))
        self.gate = threading.Event()
        self._error = error
        self._unread = [self._read]

    def _read(self) -> None:
        self.gate.wait()
        if self._error is not None:
            raise self._error


class Submitted:
    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


class Story:
    """Requests to one handle; the names are recorded in the order in which the requests end."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self.handle = make_handle(FakeModel())
        self.handle.start()
        self.ends: list[tuple[str, PenstockError | None]] = []
        self.submitted = Submitted()

    def add(self, name: str, lease: Lease | None = None, sequence: int = 0) -> Cancellable:
        request = InferRequest("m", {}, id=name, sequence_id=sequence, lease=lease)
        assert self.arrivals.must_wait(request)

        def submit() -> Cancellable:
            self.ends.append((name, None))
            return self.submitted

        return self.arrivals.add(self.handle, request, submit, lambda error: self.ends.append((name, error)))

    async def until(self, count: int) -> list[str]:
        while len(self.ends) < count:
            await asyncio.sleep(0)
        return [name for name, _ in self.ends]


def told(test: Callable[[Story], Any]) -> Callable[[], None]:
    def run() -> None:
        async def story() -> None:
            await test(Story())

        asyncio.run(story())

    run.__name__ = test.__name__
    return run


@told
async def test_a_request_is_submitted_once_its_inputs_are_read(story: Story) -> None:
    lease = GatedLease()
    pending = story.add("a", lease)
    await asyncio.sleep(0)
    assert not story.ends
    unloading = asyncio.ensure_future(story.handle.unload())
    await asyncio.sleep(0)
    assert not unloading.done(), "unloading waits for the request"
    lease.gate.set()
    assert await story.until(1) == ["a"]
    pending.cancel()
    assert story.submitted.cancelled == 1
    await unloading


@told
async def test_requests_with_inputs_in_memory_do_not_wait(story: Story) -> None:
    lease = GatedLease()
    story.add("a", lease, sequence=5)
    read = GatedLease()
    read.gate.set()
    await read.fill()
    for request in (InferRequest("m", {}), InferRequest("m", {}, lease=read), InferRequest("m", {}, sequence_id=6)):
        assert not story.arrivals.must_wait(request)
    lease.gate.set()
    await story.until(1)


@told
async def test_the_requests_of_a_sequence_keep_their_order(story: Story) -> None:
    first, second = GatedLease(), GatedLease()
    story.add("a", first, sequence=5)
    story.add("b", second, sequence=5)
    story.add("c", sequence=5)
    second.gate.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not story.ends
    first.gate.set()
    assert await story.until(3) == ["a", "b", "c"]
    await asyncio.sleep(0)
    assert not story.arrivals.must_wait(InferRequest("m", {}, sequence_id=5))


@pytest.mark.parametrize("error", [InvalidArgument("region 'r' is smaller"), ValueError("a bug")])
def test_inputs_that_cannot_be_read_fail_the_request(error: Exception) -> None:
    @told
    async def test(story: Story) -> None:
        lease = GatedLease(error)
        lease.gate.set()
        story.add("a", lease)
        await story.until(1)
        expected = error if isinstance(error, PenstockError) else PenstockError("internal error")
        assert str(story.ends[0][1]) == str(expected)
        await asyncio.wait_for(story.handle.unload(), 20)

    test()


@told
async def test_a_request_cancelled_while_it_waits_ends_at_once(story: Story) -> None:
    lease = GatedLease()
    pending = story.add("a", lease)
    pending.cancel()
    pending.cancel()
    assert [type(error) for _, error in story.ends] == [Cancelled]
    lease.gate.set()
    await asyncio.wait_for(story.handle.unload(), 20)
    assert len(story.ends) == 1
