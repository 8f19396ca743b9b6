"""Requests between sibling processes. The tests run all of them in one process, over real sockets."""

from __future__ import annotations

import asyncio
import functools
import logging
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import NotFound, PenstockError, Unavailable
from penstock.online.server.processes.group import SocketGroup


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))  # type: ignore[arg-type]

    return run


async def echo(what: str, arguments: list[Any]) -> Any:
    if what == "fail":
        raise NotFound("nothing there", "look elsewhere")
    if what == "break":
        raise RuntimeError("a secret")
    return [what, arguments]


@in_loop
async def test_each_sibling_answers_and_nobody_asks_itself(tmp_path: Path) -> None:
    ends = [SocketGroup(tmp_path, index) for index in range(3)]
    for end in ends:
        await end.serve(echo)
    assert await ends[0].ask("add", 1, {"a": b"\x00"}) == [["add", [1, {"a": b"\x00"}]]] * 2
    await ends[2].close()
    assert await ends[0].ask("add") == [["add", []]]
    for end in ends[:2]:
        await end.close()


@in_loop
async def test_errors_come_back_as_what_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = SocketGroup(tmp_path, 0), SocketGroup(tmp_path, 1)
    await other.serve(echo)
    with pytest.raises(NotFound, match=r"nothing there \(look elsewhere\)"):
        await one.ask("fail")
    with caplog.at_level(logging.CRITICAL), pytest.raises(PenstockError, match="^internal error$"):
        await one.ask("break")
    await other.close()


@in_loop
async def test_a_sibling_that_died_is_left_out(tmp_path: Path) -> None:
    one, other = SocketGroup(tmp_path, 0), SocketGroup(tmp_path, 1)
    await other.serve(echo)
    other._server.close()  # type: ignore[union-attr] - as if killed: the socket's file stays
    await other._server.wait_closed()  # type: ignore[union-attr]
    assert await one.ask("add") == []


def test_a_question_in_flight_when_the_loop_ends_is_no_error(tmp_path: Path) -> None:
    errors: list[dict[str, Any]] = []

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        entered = asyncio.Event()

        async def never(what: str, arguments: list[Any]) -> Any:
            entered.set()
            await asyncio.Event().wait()

        one, other = SocketGroup(tmp_path, 0), SocketGroup(tmp_path, 1)
        await other.serve(never)
        question = asyncio.create_task(one.ask("add", patient=True))
        await entered.wait()
        await other.close()
        assert not question.done()

    asyncio.run(ask())  # also cancels the remaining tasks
    assert errors == []


@in_loop
async def test_a_message_beyond_the_limit_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    end = SocketGroup(tmp_path, 0)
    await end.serve(echo)
    reader, writer = await asyncio.open_unix_connection(tmp_path / "0.sock")
    writer.write(struct.pack("<I", 2**32 - 1))
    assert await reader.read() == b""
    assert "could not be answered" in caplog.text
    writer.close()
    await end.close()


@pytest.mark.parametrize("said", [b"\xc1", b"\x01", b"\x91\xa1x", b"\x92\x01\x90", b"\x92\xa1x\x01", b"\x91" * 5000])
@in_loop
async def test_nonsense_is_not_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture, said: bytes) -> None:
    end = SocketGroup(tmp_path, 0)
    await end.serve(echo)
    reader, writer = await asyncio.open_unix_connection(tmp_path / "0.sock")
    writer.write(struct.pack("<I", len(said)) + said)
    assert await reader.read() == b""
    assert "could not be answered" in caplog.text
    writer.close()
    await end.close()


@pytest.mark.parametrize(
    "said", [b"", b"\x01\0\0\0\xc1", b"\x03\0\0\0\x92\x01\xc0", b"\xff\xff\xff\xff", b"\x05\0\0\0\x92"]
)
@in_loop
async def test_a_sibling_that_answers_nonsense_is_left_out(tmp_path: Path, said: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    server = await asyncio.start_unix_server(handle, tmp_path / "1.sock")
    assert await SocketGroup(tmp_path, 0).ask("add") == []
    server.close()


@in_loop
async def test_one_process_at_a_time(tmp_path: Path) -> None:
    inside = 0

    async def visit(end: SocketGroup) -> None:
        nonlocal inside
        async with end.exclusive():
            inside += 1
            await asyncio.sleep(0)
            assert inside == 1
            inside -= 1

    await asyncio.gather(*(visit(SocketGroup(tmp_path, index)) for index in range(3) for _ in range(3)))


@in_loop
async def test_who_waits_too_long_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.online.server.processes.group._LOCK_PATIENCE_S", 0.0)
    async with SocketGroup(tmp_path, 0).exclusive():
        with pytest.raises(Unavailable, match="busy"):
            async with SocketGroup(tmp_path, 1).exclusive():
                pass
    async with SocketGroup(tmp_path, 1).exclusive():
        pass


@in_loop
async def test_a_sibling_that_is_slow_is_waited_for_only_by_the_patient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.online.server.processes.group._PATIENCE_S", 0.05)
    go = asyncio.Event()

    async def answer(what: str, arguments: list[Any]) -> Any:
        await go.wait()
        return what

    one, other = SocketGroup(tmp_path, 0), SocketGroup(tmp_path, 1)
    await other.serve(answer)
    patient = asyncio.ensure_future(one.ask("patient", patient=True))
    assert await one.ask("impatient") == []
    assert "did not answer" in caplog.text
    go.set()
    assert await patient == ["patient"]
    await other.close()
