"""mosec: ``/json`` accepts JSON, and ``/raw`` accepts raw rows of FP32. mosec's front end, written in Rust, merges both into
batches.

python -m benchmarks.peers.mosec_app model.onnx

These were the fastest of the tried settings: batches of up to 64, with a maximum wait of 1 ms (0 would mean mosec's default of 10
ms).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from mosec import Runtime, Server, Worker

from benchmarks.peers.announce import HOST, announce_later, free_ports, session

_BATCH = 64


class Json(Worker):
    """Requests of the form ``{"input": [numbers]}``, read and written by mosec."""

    def __init__(self) -> None:
        self.session = session(os.environ["PEER_MODEL"])

    def forward(self, data: list[Any]) -> list[Any]:
        rows = np.array([one["input"] for one in data], np.float32)
        return [{"output": row} for row in self.session.run(None, {"input": rows})[0].tolist()]


class Raw(Json):
    """Requests and responses that are the bytes of a row."""

    def deserialize(self, data: bytes) -> Any:
        return np.frombuffer(data, np.float32)

    def serialize(self, data: Any) -> bytes:
        return bytes(data.tobytes())

    def forward(self, data: list[Any]) -> list[Any]:
        return list(self.session.run(None, {"input": np.stack(data)})[0])


def main() -> None:
    """Serve the model named on the command line on a free port until told to stop."""
    os.environ["PEER_MODEL"] = os.path.abspath(sys.argv[1])
    (port,) = free_ports(1)
    sys.argv = [sys.argv[0], "--address", HOST, "--port", str(port), "--log-level", "warning"]
    server = Server()
    server.register_runtime(
        {
            "/json": [Runtime(Json, num=1, max_batch_size=_BATCH, max_wait_time=1)],
            "/raw": [Runtime(Raw, num=1, max_batch_size=_BATCH, max_wait_time=1)],
        }
    )
    announce_later(port, "/")
    server.run()


if __name__ == "__main__":
    main()
