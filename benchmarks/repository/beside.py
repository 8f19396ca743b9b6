"""The cost of ensembles, Python models and sequences. Compares three models in an ensemble with the same three models called one
after the other by a client whose requests are ready; an identity model in Python with an identity model in ONNX; and a sequence of
one request with a plain request. Both sides alternate round by round. The server runs on one core and the load on another.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.repository.control import add, repository_server
from benchmarks.results import Row, fact
from benchmarks.rounds import Round, Side, difference, http_side, measure, ratio
from benchmarks.servers import Server, split_cores
from penstock.perf.oip_client import infer_request
from penstock.tensor import Array

_WIDTH = 32
ROW: Array = np.random.default_rng(0).standard_normal((1, _WIDTH)).astype(np.float32)
_SEQUENCES = 512
_TENSORS = "".join(
    f'{way} [{{ name: "{way}" data_type: TYPE_FP32 dims: [{_WIDTH}] }}]\n' for way in ("input", "output")
)
_STEPS = (("first", "input", "one"), ("second", "one", "two"), ("third", "two", "output"))
_ENSEMBLE = f"""max_batch_size: 64
{_TENSORS}ensemble_scheduling {{ step [{
    ", ".join(
        f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "input" value: "{source}" }} '
        f'output_map {{ key: "output" value: "{target}" }} }}'
        for name, source, target in _STEPS
    )
}] }}
"""
_PYTHON = f'backend: "python"\nmax_batch_size: 64\n{_TENSORS}'
_CODE = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "input").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("output", array)]) for array in inputs]
"""


def beside(quick: bool) -> list[Row]:
    """Return the rows of this part."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        fill(Path(folder), root)
        with repository_server(root, split_cores()[0]) as server:
            sides = _sides(server)
            rounds, seconds = (3, 0.5) if quick else (9, 1.0)
            one, many = (measure(sides, connections, rounds, seconds) for connections in (1, 16))
    return [
        _ratio("ensemble of 3 to 3 requests, chains/s at 1 connection", one["ensemble"], one["steps"], len(_STEPS)),
        _ratio("ensemble of 3 to 3 requests, chains/s at 16 connections", many["ensemble"], many["steps"], len(_STEPS)),
        _more("Python to ONNX, p50 at 1 connection", one["python"], one["onnx"]),
        _ratio("Python to ONNX, requests/s at 16 connections", many["python"], many["onnx"]),
        _more("sequence to none, p50 at 1 connection", one["sequence"], one["onnx"]),
        _ratio("sequence to none, requests/s at 16 connections", many["sequence"], many["onnx"]),
    ]


def fill(folder: Path, root: Path) -> None:
    """Write all models into the repository ``root``. ``folder`` is for temporary files."""
    for name, _, _ in _STEPS:
        add(root, name, models.mlp(folder / "mlp.onnx", (_WIDTH, 64, _WIDTH)))
    (root / "ensemble" / "1").mkdir(parents=True)
    (root / "ensemble" / "config.pbtxt").write_text(f'platform: "ensemble"\n{_ENSEMBLE}')
    (folder / "model.py").write_text(_CODE)
    add(root, "python", folder / "model.py", _PYTHON)
    same = models.identity(folder / "identity.onnx", _WIDTH)
    add(root, "onnx", same)
    add(root, "sequence", same, "max_batch_size: 64\nsequence_batching { oldest { max_candidate_sequences: 64 } }\n")


def _sides(server: Server) -> dict[str, Side]:
    row = {"input": ROW}
    asked = {"ensemble": ["ensemble"], "steps": [name for name, _, _ in _STEPS], "python": ["python"], "onnx": ["onnx"]}
    address = server.address
    sides = {
        side: http_side(server, [infer_request(address, name, row, binary=True) for name in names])
        for side, names in asked.items()
    }
    whole = [
        {"sequence_id": number, "sequence_start": True, "sequence_end": True} for number in range(1, _SEQUENCES + 1)
    ]
    requests = [infer_request(address, "sequence", row, binary=True, parameters=one) for one in whole]
    return {**sides, "sequence": http_side(server, requests)}


def _ratio(name: str, ours: list[Round], theirs: list[Round], requests: int = 1) -> Row:
    """The throughput of ``ours`` relative to ``theirs``. ``theirs`` needs ``requests`` requests for each request of ``ours``."""
    over, under = [one.throughput for one in ours], [one.throughput / requests for one in theirs]
    found = ratio(over, under)
    return fact(
        name, found.value, "×", interval=found, note=f"{np.median(over):,.0f} : {np.median(under):,.0f} a second"
    )


def _more(name: str, ours: list[Round], theirs: list[Round]) -> Row:
    over, under = ([1e3 * one.p50_ms for one in some] for some in (ours, theirs))
    found = difference(over, under)
    return fact(
        name, found.value, "µs more", interval=found, note=f"{np.median(over):,.0f} : {np.median(under):,.0f} µs"
    )
