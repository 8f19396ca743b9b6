import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.offline.convert.worker.remote import open_remote
from penstock.tensor import DataType

_CONFINED = """
import sys
from penstock.offline.convert.worker.confine import WRITES_ANYWHERE, confine
notes = confine(1 << 40, 1 << 40, sys.argv[2:])
if WRITES_ANYWHERE in notes:
    sys.exit(3)
outside = sys.argv[1]
"""


@pytest.fixture
def confined(tmp_path):
    """Runs code in a confined process, whose folder is ``own``. Returns what it prints."""
    (tmp_path / "own").mkdir()
    (tmp_path / "outside").write_text("kept")

    def run(code, *reads):
        command = [sys.executable, "-c", _CONFINED + code, str(tmp_path / "outside"), *map(str, reads)]
        done = subprocess.run(command, cwd=tmp_path / "own", capture_output=True, text=True, check=False)
        if done.returncode == 3:
            pytest.skip("this system can restrict writing in no way")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    yield run
    assert (tmp_path / "outside").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "own", "tmp"]


@pytest.mark.parametrize(
    "attempt",
    [
        "open(outside, 'w')",
        "open(outside, 'r+b')",
        "open(outside + '2', 'x')",
        "os.truncate(outside, 0)",
        "os.unlink(outside)",
        "os.rename(outside, 'taken')",
        "os.link(outside, 'linked')",
        "os.symlink('x', outside + '2')",
        "os.mkdir(outside + '2')",
        "os.mkfifo(outside + '2')",
        "open('/proc/self/root' + outside, 'w')",
        "os.symlink(outside, 'link'); open('link', 'w')",
    ],
)
def test_nothing_outside_the_folder_can_be_changed(confined, attempt):
    code = f"""
import os
try:
    {attempt}
except OSError as error:
    print("refused")
"""
    assert confined(code) == "refused"


def test_what_the_process_starts_is_confined_too(confined):
    code = """
import subprocess
print(subprocess.run(["sh", "-c", 'echo changed > "$0"; echo "$?"', outside], stdout=subprocess.PIPE, text=True).stdout)
"""
    assert confined(code) != "0"


def test_the_folder_and_devices_can_be_used_and_everything_can_be_read(confined, tmp_path):
    code = """
import os, multiprocessing
os.makedirs("a/b")
open("a/b/file", "w").write("1")
os.rename("a/b/file", "a/file")
open(os.devnull, "w").write("nothing")
print(open(outside).read(), open("a/file").read())
"""
    assert confined(code) == "kept 1"


def test_shared_memory_is_new_unless_the_source_is_there(confined):
    code = """
import os
try:
    open("/dev/shm/penstock-test-own", "x")
    print(os.listdir("/dev/shm"))
except OSError:
    print("refused")
"""
    assert confined(code) in ("['penstock-test-own']", "refused")
    assert confined(code, "/dev/shm/model.pt") == "refused"
    assert not Path("/dev/shm/penstock-test-own").exists()


def test_operators_of_torchscript_write_nothing(tmp_path):
    torch = pytest.importorskip("torch")
    mapped, saved = tmp_path / "mapped", tmp_path / "saved"
    (tmp_path / "attacks.py").write_text(f"""
import torch

class Maps(torch.nn.Module):
    def forward(self, x):
        mapped = torch.from_file({str(mapped)!r}, True, 16, dtype=torch.uint8)
        mapped.copy_(torch.ones(16, dtype=torch.uint8))
        return x + mapped[0].float()

class Saves(torch.nn.Module):
    def forward(self, x):
        torch.save(x, {str(saved)!r})
        return x + 1
""")
    attacks = _module(tmp_path / "attacks.py")
    options = ConvertOptions(inputs=(InputSpec("x", DataType.FP32, (2, 3)),))
    for attack in (attacks.Maps(), attacks.Saves()):
        torch.jit.script(attack).save(tmp_path / "attack.pt")
        with contextlib.suppress(PenstockError), open_remote("torchscript", tmp_path / "attack.pt", options) as model:
            model.forward({"x": np.ones((2, 3), np.float32)})
            model.export(tmp_path / "attack.onnx", 17)
    assert not mapped.exists()
    assert not saved.exists()


@pytest.mark.slow
def test_operators_of_tensorflow_write_nothing(tmp_path):
    tf = pytest.importorskip("tensorflow")
    pytest.importorskip("tf2onnx")
    written = tmp_path / "written"

    class Writes(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
        def f(self, x):
            tf.io.write_file(str(written), "attacked")
            return {"y": x + 1}

    attack = Writes()
    tf.saved_model.save(attack, str(tmp_path / "attack"), signatures=attack.f)
    with contextlib.suppress(PenstockError), open_remote("saved_model", tmp_path / "attack", ConvertOptions()) as model:
        model.forward({"x": np.ones((2, 3), np.float32)})
        model.export(tmp_path / "attack.onnx", 17)
    assert not written.exists()


def _module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
