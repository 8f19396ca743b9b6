"""Clients that request large responses and never read them."""

from __future__ import annotations

import asyncio

import numpy as np

from benchmarks.attacks.site import Attack, Site
from benchmarks.attacks.wire import H2Wire, HttpWire
from penstock.perf.grpc_client import framed
from penstock.perf.oip_client import infer_message, infer_request
from penstock.protocol import h2_frames as h2

MODEL = "widen"
"""Name of a model with one number per input row and ``COLUMNS`` numbers per output row."""
COLUMNS = 65_536
_ROWS = 32
"""Number of rows per request. Each response has 8 MiB."""
_PIPELINED = 512
_CALLS = 400
_STAY_S = 3600.0  # the attack ends earlier


async def _unread_http(site: Site) -> None:
    request = infer_request(site.http, MODEL, {"input": np.ones((_ROWS, 1), np.float32)}, binary=True)
    if site.key:
        request = request.replace(b"\r\n", f"\r\nAuthorization: Bearer {site.key}\r\n".encode(), 1)
    async with HttpWire(site, reads=False) as wire:
        for _ in range(_PIPELINED):
            await wire.send(request)
            site.count("requests sent")
        await asyncio.sleep(_STAY_S)


async def _unread_grpc(site: Site) -> None:
    message = framed(infer_message(MODEL, {"input": np.ones((_ROWS, 1), np.float32)}))
    async with H2Wire(site, window=0) as wire:
        await wire.open()
        for _ in range(_CALLS):
            stream, head = wire.call("ModelInfer")
            await wire.send(head)
            await wire.data(stream, message, h2.END_STREAM)
            site.count("calls sent")
        await wire.closed()


UNREAD = {
    "unread-http": Attack(f"{_PIPELINED} pipelined requests with answers of 8 MiB that are not read", _unread_http),
    "unread-grpc": Attack(f"{_CALLS} calls with answers of 8 MiB and a window of 0", _unread_grpc),
}
