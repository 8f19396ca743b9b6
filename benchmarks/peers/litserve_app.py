"""LitServe: a ``LitAPI`` that merges rows into batches. ``/predict`` accepts ``{"input": [numbers]}``.

python -m benchmarks.peers.litserve_app model.onnx

There are one process for HTTP and one worker, connected by LitServe's faster queue (ZeroMQ). The batch timeout has the smallest
possible value.
"""

from __future__ import annotations

import os
import sys

import litserve
import numpy as np

from benchmarks.peers.announce import HOST, announce_later, free_ports, session


class Api(litserve.LitAPI):  # type: ignore[misc]
    # There are no annotations, because LitServe would use them as the schema of requests.

    def setup(self, device):
        self.session = session(os.environ["PEER_MODEL"])

    def decode_request(self, request):
        return np.array(request["input"], np.float32)

    def predict(self, x):
        return self.session.run(None, {"input": x})[0]

    def encode_response(self, output):
        return {"output": output.tolist()}


def main() -> None:
    """Serve the model named on the command line on a free port until told to stop."""
    os.environ["PEER_MODEL"] = os.path.abspath(sys.argv[1])
    (port,) = free_ports(1)
    api = Api(max_batch_size=64, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True, timeout=False)
    announce_later(port, "/health")
    server.run(
        host=HOST, port=port, num_api_servers=1, log_level="warning", generate_client_file=False, access_log=False
    )


if __name__ == "__main__":
    main()
