"""MLServer: a custom runtime with MLServer's Open Inference Protocol, over HTTP and gRPC, and with adaptive batching.

python -m benchmarks.peers.mlserver_app model.onnx

The model runs in the server's process (``parallel_workers: 0``), which was faster on one core than worker processes. Metrics are
disabled.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.peers.announce import HOST, announce_later, free_ports, session


class OnnxModel(MLModel):  # type: ignore[misc]
    async def load(self) -> bool:
        self._session = session(os.environ["PEER_MODEL"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        inputs: dict[str, Any] = {one.name: NumpyCodec.decode_input(one).astype("float32") for one in payload.inputs}
        (output,) = self._session.run(None, inputs)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("output", output)])


async def serve(name: str, http: int, grpc: int, metrics: int) -> None:
    settings = Settings(
        host=HOST, http_port=http, grpc_port=grpc, metrics_port=metrics, parallel_workers=0, debug=False,
        metrics_endpoint=None, cors_settings=None, environments_dir="/tmp", load_models_at_startup=False,
    )  # fmt: skip
    model = ModelSettings(name=name, implementation=OnnxModel, max_batch_size=64, max_batch_time=0.001)
    announce_later(http, f"/v2/models/{name}/ready", grpc)
    await MLServer(settings).start([model])


def main() -> None:
    """Serve the model named on the command line on free ports until told to stop."""
    os.environ["PEER_MODEL"] = sys.argv[1]
    http, grpc, metrics = free_ports(3)
    asyncio.run(serve(Path(sys.argv[1]).stem, http, grpc, metrics))


if __name__ == "__main__":
    main()
