"""KServe's Python runtime: a ``kserve.Model`` with KServe's Open Inference Protocol, over HTTP and gRPC. It does not merge
requests.

python -m benchmarks.peers.kserve_app model.onnx
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import kserve
from kserve import InferOutput, InferRequest, InferResponse

from benchmarks.peers.announce import announce_later, free_ports, session


class OnnxModel(kserve.Model):  # type: ignore[misc]
    def __init__(self, name: str, path: str) -> None:
        super().__init__(name)
        self._session = session(path)
        self.ready = True

    async def predict(self, payload: InferRequest, *_: Any, **__: Any) -> InferResponse:
        inputs = {one.name: one.as_numpy().astype("float32", copy=False) for one in payload.inputs}
        (array,) = self._session.run(None, inputs)
        output = InferOutput(name="output", shape=list(array.shape), datatype="FP32")
        binary = payload.use_binary_outputs
        output.set_data_from_numpy(array, binary_data=binary)
        return InferResponse(payload.id or "", self.name, [output], use_binary_outputs=binary)


def main() -> None:
    """Serve the model named on the command line on free ports until told to stop."""
    name = Path(sys.argv[1]).stem
    http, grpc = free_ports(2)
    announce_later(http, f"/v2/models/{name}/ready", grpc)
    server = kserve.ModelServer(
        http_port=http, grpc_port=grpc, enable_grpc=True, workers=1, enable_docs_url=False, enable_latency_logging=False
    )
    for logger in ("kserve.trace", "uvicorn.access"):  # several lines per request otherwise
        logging.getLogger(logger).setLevel(logging.WARNING)
    server.start([OnnxModel(name, sys.argv[1])])


if __name__ == "__main__":
    main()
