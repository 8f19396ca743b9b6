"""Clients that send a request byte by byte, over many connections."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from benchmarks.attacks.site import Attack, Site
from benchmarks.attacks.wire import HttpWire

_CONNECTIONS = 64
"""Number of connections per attacker."""
_PAUSE_S = 0.1
_BODY_BYTES = 1 << 20


async def _trickle(site: Site, first: bytes, byte: bytes) -> None:
    async with AsyncExitStack() as held:
        wires = [await held.enter_async_context(HttpWire(site)) for _ in range(_CONNECTIONS)]
        for wire in wires:
            await wire.send(first)
        site.count("requests begun", len(wires))
        while True:
            for wire in wires:
                await wire.send(byte)
            site.count("bytes trickled", len(wires))
            await asyncio.sleep(_PAUSE_S)


async def _slow_headers(site: Site) -> None:
    head = f"POST /v2/models/identity/infer HTTP/1.1\r\nHost: {site.http.authority}\r\nX-Slow: "
    await _trickle(site, head.encode(), b"x")


async def _slow_body(site: Site) -> None:
    body = HttpWire(site).request("/v2/models/identity/infer", bytes(_BODY_BYTES))
    await _trickle(site, body[:-_BODY_BYTES] + b'{"inputs":[', b" ")


SLOW = {
    "slow-headers": Attack(f"{_CONNECTIONS} connections per attacker, whose headers never end", _slow_headers),
    "slow-body": Attack(f"{_CONNECTIONS} connections per attacker, whose bodies arrive byte by byte", _slow_body),
}
