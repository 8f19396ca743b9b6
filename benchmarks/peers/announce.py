"""Helps peers to start: finds free ports, creates the ONNX Runtime session, and prints the line ``ready`` once the peer answers.

The peers' own environments import this module, so its top-level imports are only from the standard library.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

HOST = "127.0.0.1"
TIMEOUT_S = 120


def free_ports(count: int) -> list[int]:
    """Currently unused ports."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def session(model: str) -> Any:
    """The model in ONNX Runtime with one thread, as Penstock runs it."""
    import onnxruntime  # noqa: PLC0415 - not in the process that only starts a server

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def announce(http: int, probe: str, grpc: int | None = None, says: str = "") -> None:
    """Print the line ``ready`` once the URL or path ``probe`` answers with 200 and a body that contains ``says``. End the process
    if this never happens.
    """
    url = probe if probe.startswith("http") else f"http://{HOST}:{http}{probe}"
    end = time.monotonic() + TIMEOUT_S
    while not _answers(url, says.encode()):
        if time.monotonic() > end:
            print(f"no answer from {url}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(0.05)
    print(f"ready http={HOST}:{http}" + (f" grpc={HOST}:{grpc}" if grpc else ""), flush=True)


def announce_later(http: int, probe: str, grpc: int | None = None, says: str = "") -> None:
    """Call ``announce`` on another thread, because this process will run the server itself."""
    threading.Thread(target=announce, args=(http, probe, grpc, says), daemon=True).start()


def run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a server that is a separate program until this process is told to stop. Returns the server's exit status."""
    process = subprocess.Popen(command, stdout=sys.stderr, env=os.environ | environment)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


def _answers(url: str, says: bytes) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return says in answer.read()
    except (urllib.error.URLError, OSError):
        return False
