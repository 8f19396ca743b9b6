"""What every peer needs to start: free ports, a session of ONNX Runtime, and the line ``ready`` once it answers.

Imported in the peers' own environments: only the standard library at the top.
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
    """Ports that nobody listens on now."""
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
    """Print the line ``ready`` when the URL ``probe``, or that path, answers 200 and ``says``; end the process if it never does."""
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
    """The same beside a server that this process is about to run itself."""
    threading.Thread(target=announce, args=(http, probe, grpc, says), daemon=True).start()


def run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a server that is a program of its own until this process is told to stop; its exit status."""
    process = subprocess.Popen(command, stdout=sys.stderr, env=os.environ | environment)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


def _answers(url: str, says: bytes) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return says in answer.read()
    except (urllib.error.URLError, OSError):
        return False
