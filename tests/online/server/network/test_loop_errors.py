"""Uncaught errors on the event loop."""

from __future__ import annotations

import asyncio
import errno

import pytest

from penstock.online.server.network.loop_errors import LoopErrors


def test_a_shortage_is_told_once_in_a_while_and_everything_else_each_time(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        for _ in range(100):
            error = OSError(errno.EMFILE, "Too many open files")
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
        loop.call_soon([].pop)
        loop.call_soon({}.popitem)
        await asyncio.sleep(0)

    asyncio.run(main())
    shortage, first, second = caplog.records
    assert shortage.getMessage() == "cannot accept connections: Too many open files; raise the limit with `ulimit -n`"
    assert shortage.exc_info is None
    assert [record.exc_info[0] for record in (first, second) if record.exc_info] == [IndexError, KeyError]
