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
