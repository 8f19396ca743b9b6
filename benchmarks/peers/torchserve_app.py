"""TorchServe: a handler that merges rows into batches. ``/predictions/mlp`` accepts ``{"input": [numbers]}``. Requires Java.

python -m benchmarks.peers.torchserve_app model.onnx

There is one worker, with batches of up to 64 and a maximum wait of 1 ms. Token authorisation and telemetry are disabled.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.announce import HOST, announce_later, free_ports, run, session

_MODEL = "mlp"

_LOG = """<Configuration><Appenders><Console name="out" target="SYSTEM_ERR"/></Appenders>
<Loggers><Root level="warn"><AppenderRef ref="out"/></Root></Loggers></Configuration>
"""


class Handler:
    """The handler that TorchServe's worker imports: a class with ``initialize`` and ``handle``."""

    def initialize(self, context: Any) -> None:
        self.session = session(os.environ["PEER_MODEL"])
        self.initialized = True

    def handle(self, data: list[Any], context: Any) -> list[Any]:
        import numpy as np  # noqa: PLC0415 - only in the worker

        rows = np.array([_row(one) for one in data], np.float32)
        return [{"output": row} for row in self.session.run(None, {"input": rows})[0].tolist()]


def _row(one: Any) -> Any:
    body = one.get("body") or one.get("data")
    return (json.loads(body) if isinstance(body, bytes | bytearray | str) else body)["input"]


def write_model(store: Path) -> None:
    """Write an unpacked model archive with the handler of this file."""
    folder = store / _MODEL / "MAR-INF"
    folder.mkdir(parents=True)
    manifest = {
        "runtime": "python",
        "model": {"modelName": _MODEL, "handler": "handler.py", "modelVersion": "1.0"},
        "archiverVersion": "0.12.0",
        "createdOn": "01/01/2025 00:00:00",
    }
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    # TorchServe uses only a class that the file itself defines.
    text = "from benchmarks.peers import torchserve_app\n\nclass Handler(torchserve_app.Handler):\n    pass\n"
    (folder.parent / "handler.py").write_text(text)


def write_settings(path: Path, store: Path, ports: list[int]) -> None:
    """Write ``config.properties``, which includes the batch settings of the model."""
    model = {
        "defaultVersion": True,
        "marName": _MODEL,
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 64,
        "maxBatchDelay": 1,
    }
    addresses = ("inference_address", "management_address", "metrics_address")
    lines = [f"{name}=http://{HOST}:{port}" for name, port in zip(addresses, ports, strict=False)]
    lines += [
        f"grpc_inference_port={ports[3]}", f"grpc_management_port={ports[4]}", f"model_store={store}",
        f"load_models={_MODEL}", f"models={json.dumps({_MODEL: {'1.0': model}})}", "disable_token_authorization=true",
        "job_queue_size=4096", "disable_system_metrics=true", "use_env_allowed_urls=false",
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")


def main() -> int:
    """Serve the model named on the command line on free ports until told to stop."""
    ports = free_ports(5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "store")
        (folder / "log4j2.xml").write_text(_LOG)
        write_settings(folder / "config.properties", folder / "store", ports)
        command = [
            str(Path(sys.executable).parent / "torchserve"), "--start", "--foreground", "--disable-token-auth",
            "--log-config", str(folder / "log4j2.xml"), "--ts-config", str(folder / "config.properties"),
            "--model-store", str(folder / "store"),
        ]  # fmt: skip
        environment = {
            "PEER_MODEL": str(Path(sys.argv[1]).resolve()),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "LOG_LOCATION": str(folder),
            "METRICS_LOCATION": str(folder),
            "TEMP": str(folder),
        }
        announce_later(ports[0], f"http://{HOST}:{ports[1]}/models/{_MODEL}", says='"READY"')
        return run(command, environment)


if __name__ == "__main__":
    sys.exit(main())
