"""Triton's public client examples, run as they are against the models that they ask for.

They are not part of this project. ``PENSTOCK_TRITON_EXAMPLES`` names a folder with ``src/python/examples`` of Triton's client
repository; without it these tests are skipped. ``test_triton_clients.py`` goes the same ways without them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import ServerProcess
from triton_models import write_custom, write_examples

_FOLDER = Path(os.environ.get("PENSTOCK_TRITON_EXAMPLES", "/nowhere"))
_PATIENCE_S = 60
_NEED_MORE = ("cudashm", "vllm", "ensemble_image", "image_client", "grpc_client", "memory_growth", "custom_args")
"""Examples that want a GPU, another server, files that are not there, or arguments: those that can be run are below."""

EXAMPLES = sorted(path.name for path in _FOLDER.glob("*.py") if not any(word in path.name for word in _NEED_MORE))
WITH_ARGUMENTS = [
    ("simple_grpc_sequence_sync_infer_client.py", "-d"),
    ("simple_grpc_sequence_stream_infer_client.py", "-d"),
    ("simple_http_sequence_sync_infer_client.py", "-d"),
    ("simple_grpc_aio_sequence_stream_infer_client.py", "-d"),
    ("reuse_infer_objects_client.py", "-i", "http"),
    ("simple_grpc_custom_args_client.py",),
    ("grpc_client.py",),
]

pytestmark = pytest.mark.skipif(not EXAMPLES, reason="PENSTOCK_TRITON_EXAMPLES names no folder of examples")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("repositories")
    folders = write_examples(root / "examples"), write_custom(root / "custom")
    arguments = [word for folder in folders for word in ("--model-repository", str(folder))]
    with ServerProcess(arguments=tuple(arguments), server_name="triton") as server:
        yield server


@pytest.fixture
def controlled(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """With as many models, to be loaded, as the example counts: eight over gRPC, seven over HTTP."""
    folder = write_examples(tmp_path / "examples")
    if "http" in request.node.name:
        shutil.rmtree(folder / "densenet_onnx")
    arguments = ("--model-repository", str(folder), "--model-control-mode", "explicit")
    with ServerProcess(arguments=arguments, server_name="triton") as server:
        yield server


def run(server: ServerProcess, name: str, *arguments: str) -> None:
    url = "{}:{}".format(*server.address)
    command = [
        sys.executable,
        str(_FOLDER / name),
        *arguments,
        "-u",
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("name", [name for name in EXAMPLES if "model_control" not in name])
def test_example(server: ServerProcess, name: str) -> None:
    run(server, name)


@pytest.mark.parametrize("words", WITH_ARGUMENTS, ids=" ".join)
def test_example_with_arguments(server: ServerProcess, words: tuple[str, ...]) -> None:
    if not (_FOLDER / words[0]).is_file():
        pytest.skip("not among the examples")
    run(server, *words)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if "model_control" in name])
def test_model_control(controlled: ServerProcess, name: str) -> None:
    run(controlled, name)
