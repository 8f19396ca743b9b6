"""What the process cannot do: use the network, much memory or large files, and outlive its parent."""

import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from fake_worker import alive, ends
from penstock.errors import (
    PenstockError,
)

X = {"x": np.array([[1, 2]], np.float32)}


def test_memory_is_limited(opened):
    code = "if call == 'forward': result = {'y': np.ones(1 << 30)}"
    with pytest.raises(PenstockError, match="Unable to allocate|more memory"):
        opened(code, memory_bytes=1 << 30).forward(X)


def test_a_written_file_is_limited(opened, tmp_path):
    with pytest.raises(PenstockError, match="File too large"):
        opened("if call == 'export': target.write_bytes(bytes(4096))", file_bytes=1024).export(tmp_path / "m.onnx", 17)
    assert not list(tmp_path.glob("*.onnx"))


def test_there_is_no_network(opened):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nif call == 'forward': socket.create_connection(('127.0.0.1', {port}), 5)"
        model = opened(code)
        if model.notes:
            pytest.skip(model.notes[0])
        with pytest.raises(PenstockError, match="unreachable"):
            model.forward(X)


def test_the_network_is_removed_without_privileges(opened):
    """A user namespace is possible only before a package starts threads."""
    model = opened("if call == 'forward': result = {'y': np.array([open('/proc/self/uid_map').read()], object)}")
    if model.notes:
        pytest.skip(model.notes[0])
    assert model.forward(X)["y"][0].split()[2] == b"1"


def test_the_process_ends_with_its_parent(tmp_path):
    (tmp_path / "source").write_text("")
    code = f"""
from pathlib import Path
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.worker.remote import open_remote
model = open_remote("fake", Path({str(tmp_path / "source")!r}), ConvertOptions(), program="fake_worker")
print(model._process._popen.pid, flush=True)
input()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *sys.path])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.send_signal(signal.SIGKILL)
    assert ends(pid)
