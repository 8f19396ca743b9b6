"""The peers: their packages, the form of their requests, and the location of their environments.

Each peer has its own environment. It is in ``.peers/NAME``, where ``python -m benchmarks.peers.install`` creates it, or in the
folder that the variable ``PENSTOCK_PEER_NAME`` names. FastAPI is part of the extra ``bench``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import msgspec
import numpy as np
import orjson

from benchmarks.requests import post
from benchmarks.servers import Server, serving
from penstock.perf.http_client import Address
from penstock.perf.oip_client import decode_answer, infer_request
from penstock.tensor import Array

ROOT = Path(__file__).parents[2]
_ENGINE = "onnxruntime==1.31.1"


class Form(msgspec.Struct, frozen=True):
    """The form of a request with one row of FP32, for a model with ``input`` [N, …] and ``output`` [N, …]."""

    request: Callable[[Address, str, Array], bytes]
    """``(address, model, row with its batch axis) -> whole HTTP request``."""
    answer: Callable[[bytes, int | None], Array]
    """``(body, json_size) -> output``, of any shape."""


def _oip(binary: bool) -> Form:
    return Form(
        lambda address, model, row: infer_request(address, model, {"input": row}, binary=binary),
        lambda body, json_size: decode_answer(body, json_size)["output"],
    )


def _plain(path: str, rows: bool = False) -> Form:
    """Requests of the form ``{"input": numbers}``. ``rows`` adds the batch axis."""
    return Form(
        lambda address, _, row: post(
            address, path, orjson.dumps({"input": row if rows else row[0]}, option=orjson.OPT_SERIALIZE_NUMPY)
        ),
        lambda body, _: np.array(_outputs(orjson.loads(body)), np.float32),
    )


def _outputs(answer: object) -> object:
    return answer["output"] if isinstance(answer, dict) else answer


def _raw(path: str) -> Form:
    """The body of the request and of the response is only the bytes of the row."""
    return Form(
        lambda address, _, row: post(address, path, row.tobytes(), "application/octet-stream"),
        lambda body, _: np.frombuffer(body, np.float32),
    )


JSON, BINARY = _oip(binary=False), _oip(binary=True)


class Peer(msgspec.Struct, frozen=True):
    """A server with which Penstock is compared."""

    name: str
    title: str
    requirements: tuple[str, ...]
    json: Form = JSON
    binary: Form | None = None
    grpc: bool = False
    """True if the peer supports the Open Inference Protocol over gRPC."""

    def python(self) -> str | None:
        """Path of the Python interpreter in the peer's environment; None if the peer is not installed."""
        if not self.requirements:
            return sys.executable if importlib.util.find_spec(self.name) else None
        folder = Path(os.environ.get(f"PENSTOCK_PEER_{self.name.upper()}") or ROOT / ".peers" / self.name)
        found = folder / "bin" / "python"
        return str(found) if found.exists() else None

    def version(self) -> str | None:
        """The installed version of the peer; None if it is not installed."""
        python = self.python()
        if python is None or not self.requirements:
            return None
        name = self.requirements[0].partition("==")[0]
        paths = [str(path) for path in Path(python).parents[1].glob("lib/python*/site-packages")]
        return next((found.version for found in metadata.distributions(name=name, path=paths)), None)

    @property
    def missing(self) -> str:
        """Instructions to install the peer, for the case that ``python`` is None."""
        command = (
            f"python -m benchmarks.peers.install {self.name}" if self.requirements else "pip install -e '.[bench]'"
        )
        return f"not installed: {command}"


@contextmanager
def running(peer: Peer, model: Path, cores: set[int], app: str = "") -> Iterator[Server]:
    """Run ``peer`` with ``model`` on ``cores``. ``app`` is the module of its application, by default that for tensors. Raises
    RuntimeError if the peer is not installed or does not start.
    """
    python = peer.python()
    if python is None:
        raise RuntimeError(peer.missing)
    arguments = ["-m", app or f"benchmarks.peers.{peer.name}_app", str(model.resolve())]
    with serving(arguments, cores, python, {"PYTHONPATH": str(ROOT)}) as server:
        yield server


PEERS = {
    peer.name: peer
    for peer in (
        Peer("fastapi", "FastAPI", (), binary=_raw("/raw")),
        Peer("triton", "Triton", ("nvidia-pytriton==0.7.0", _ENGINE), binary=BINARY, grpc=True),
        Peer("mosec", "mosec", ("mosec==0.9.8", "numpy", _ENGINE), _plain("/json"), _raw("/raw")),
        Peer("mlserver", "MLServer", ("mlserver==1.7.1", _ENGINE), grpc=True),
        Peer("kserve", "KServe", ("kserve==0.21.0", _ENGINE), grpc=True),
        Peer("litserve", "LitServe", ("litserve==0.2.19", _ENGINE), _plain("/predict")),
        Peer("bentoml", "BentoML", ("bentoml==1.4.39", "pillow", _ENGINE), _plain("/predict", rows=True)),
        Peer(
            "torchserve",
            "TorchServe",
            # TorchServe imports all these packages without requiring them. Without the pin, torch would install gigabytes of CUDA
            # packages.
            ("torchserve==0.12.0", "torch==2.13.0", "pyyaml", "pynvml", "numpy", _ENGINE),
            _plain("/predictions/mlp"),
        ),
    )
}
