"""Triton's server, over HTTP and gRPC and with shared memory. The binary is from the wheel ``nvidia-pytriton``.

python -m benchmarks.peers.triton_app model.onnx

The wheel has no ONNX backend, so the model runs in Triton's Python backend, in a separate process with shared memory. There, ONNX
Runtime runs the batches that the dynamic batcher forms. All other settings are the defaults. The machine has no GPU.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers.announce import HOST, announce_later, free_ports, run

_MODEL = """
import sys
sys.path.insert(0, {packages!r})  # the backend's own Python knows nothing of this environment
import numpy as np
import onnxruntime
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession({path!r}, options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        rows = [pb.get_input_tensor_by_name(one, "input").as_numpy() for one in requests]
        output = self.session.run(None, {{"input": rows[0] if len(rows) == 1 else np.concatenate(rows)}})[0]
        responses, start = [], 0
        for row in rows:
            tensor = pb.Tensor("output", output[start:start + len(row)])
            responses.append(pb.InferenceResponse(output_tensors=[tensor]))
            start += len(row)
        return responses
"""

_CONFIG = """
backend: "python"
max_batch_size: 64
input [{{ name: "input" data_type: TYPE_FP32 dims: {inputs} }}]
output [{{ name: "output" data_type: TYPE_FP32 dims: {outputs} }}]
dynamic_batching {{ }}
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""


def repository(folder: Path, model: Path, packages: Path) -> None:
    """Create a model repository with ``model`` as its only model."""
    import onnxruntime  # noqa: PLC0415 - only to read the shapes

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    version = folder / model.stem / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_MODEL.format(path=str(model.resolve()), packages=str(packages)))
    dims = [str(list(side[0].shape[1:])) for side in (session.get_inputs(), session.get_outputs())]
    (version.parent / "config.pbtxt").write_text(_CONFIG.format(inputs=dims[0], outputs=dims[1]))


def backends(folder: Path, packed: Path) -> Path:
    """Create a folder of backends that contains the Python backend and its stub for this version of Python."""
    found = folder / "backends"
    shutil.copytree(packed / "backends", found)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(packed / "python_backend_stubs" / version / "triton_python_backend_stub", found / "python")
    return found


def main() -> int:
    """Serve the model named on the command line on free ports until told to stop."""
    model = Path(sys.argv[1])
    http, grpc = free_ports(2)
    spec: Any = find_spec("pytriton")
    packages = Path(spec.submodule_search_locations[0]).parent
    packed = packages / "pytriton" / "tritonserver"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repository(folder / "models", model, packages)
        command = [
            str(packed / "bin" / "tritonserver"),
            "--model-repository", str(folder / "models"), "--backend-directory", str(backends(folder, packed)),
            "--http-address", HOST, "--http-port", str(http), "--grpc-address", HOST, "--grpc-port", str(grpc),
            "--allow-metrics", "false", "--log-info", "false",
        ]  # fmt: skip
        # The stub looks for libraries relative to its place in the wheel.
        environment = {"LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs")}
        announce_later(http, "/v2/health/ready", grpc)
        return run(command, environment)


if __name__ == "__main__":
    sys.exit(main())
