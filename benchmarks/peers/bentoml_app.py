"""BentoML: a service with a batchable endpoint ``/predict`` that accepts ``{"input": [[numbers]]}``.

python -m benchmarks.peers.bentoml_app model.onnx
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import bentoml
import numpy as np

from benchmarks.peers.announce import HOST, announce_later, free_ports, run, session


@bentoml.service(workers=1, traffic={"timeout": 60, "max_concurrency": 4096}, metrics={"enabled": False})
class Mlp:
    def __init__(self) -> None:
        self.session = session(os.environ["PEER_MODEL"])

    @bentoml.api(batchable=True, max_batch_size=64, max_latency_ms=1000)
    def predict(self, input: np.ndarray) -> np.ndarray:
        return np.asarray(self.session.run(None, {"input": input.astype("float32")})[0])


def serve(service: str) -> int:
    """Serve the model named on the command line with ``service`` (``module:class``) on a free port until told to stop. Returns the
    exit status.
    """
    (port,) = free_ports(1)
    environment = {
        "PEER_MODEL": str(Path(sys.argv[1]).resolve()),
        "BENTOML_DO_NOT_TRACK": "True",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "bentoml", "serve", service, "--host", HOST, "--port", str(port)]
    announce_later(port, "/readyz")
    return run(command, environment)


if __name__ == "__main__":
    sys.exit(serve("benchmarks.peers.bentoml_app:Mlp"))
