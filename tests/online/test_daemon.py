"""Work on daemon threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.online.daemon import on_daemon_thread


def test_results_and_errors_come_back_and_the_thread_is_no_hindrance() -> None:
    async def main() -> None:
        found = await on_daemon_thread(
            "worker", lambda: (threading.current_thread().name, threading.current_thread().daemon)
        )
        assert found == ("worker", True)
        with pytest.raises(ZeroDivisionError):
            await on_daemon_thread("worker", lambda: 1 // 0)

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_ends_after_the_loop_is_dropped_without_a_word(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    goes_on, threads = threading.Event(), list[threading.Thread]()

    def work() -> float:
        threads.append(threading.current_thread())
        goes_on.wait()
        return 1 / (not fails)

    async def main() -> None:
        on_daemon_thread("worker", work)

    asyncio.run(main())
    goes_on.set()
    while not threads:
        pass
    threads[0].join()
    assert not caplog.records


def test_the_result_of_a_cancelled_wait_is_dropped() -> None:
    goes_on = threading.Event()

    async def main() -> None:
        future = on_daemon_thread("worker", goes_on.wait)
        future.cancel()
        goes_on.set()
        assert await on_daemon_thread("other", lambda: 1) == 1

    asyncio.run(main())
