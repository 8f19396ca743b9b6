"""A process of its own: limits of time and memory, and nothing remains when it ends."""

import os

import numpy as np
import pytest

from fake_worker import alive, ends
from penstock.errors import (
    DeadlineExceeded,
    InvalidData,
    PenstockError,
    ResourceExhausted,
)
from penstock.offline.convert.worker.process import Limits

X = {"x": np.array([[1, 2]], np.float32)}


def test_large_arrays_and_much_text_pass_at_the_same_time(opened):
    x = np.arange(3_000_000, dtype=np.float32).reshape(-1, 2)
    model = opened("print('noise ' * 1_000_000)")
    np.testing.assert_array_equal(model.forward({"x": x})["y"], x * 2)


@pytest.mark.parametrize(
    ("code", "name"),
    [("os.kill(os.getpid(), 11)", "SIGSEGV"), ("raise SystemExit(3)", "status 3"), ("os.closerange(0, 99)", "")],
)
def test_a_process_that_ends_is_an_error_with_its_last_output_and_the_next_call_starts_another(opened, code, name):
    model = opened(f"if call == 'forward' and inputs['x'][0, 0] > 1: print('last words'); {code}")
    with pytest.raises(PenstockError, match=f"ended with {name}") as caught:
        model.forward({"x": X["x"] * 4})
    assert "last words" in caught.value.hint
    np.testing.assert_array_equal(model.forward(X)["y"], [[2, 4]])


@pytest.mark.parametrize("code", ["while True: pass", "os.close(2)", "os.kill(0, 19)"])
def test_a_call_that_takes_too_long_ends_the_process(opened, code):
    model = opened(f"if call == 'forward':\n    print(os.getpid(), flush=True)\n    {code}\n    while True: pass")
    model._process._limits = Limits(call_s=1)  # from now on, because the start can take longer
    with pytest.raises(DeadlineExceeded, match="more than 1 s") as caught:
        model.forward(X)
    assert ends(int(caught.value.hint.rpartition(" ")[2]))


def test_a_death_by_lack_of_memory_says_so(opened):
    code = "if call == 'forward': os.write(2, b'terminate called: std::bad_alloc'); os.abort()"
    with pytest.raises(ResourceExhausted, match=r"more memory than 0.5 GiB"):
        opened(code, memory_bytes=1 << 29).forward(X)


def test_the_environment_has_no_secrets_and_its_own_folders(opened, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    code = "if call == 'forward': result = {'y': np.array([repr(dict(os.environ, cwd=os.getcwd())).encode()], object)}"
    model = opened(code)
    told = model.forward(X)["y"][0].decode()
    assert "secret" not in told
    folder = model._process.folder
    assert f"'HOME': '{folder}/home'" in told
    assert f"'TMPDIR': '{folder}/tmp'" in told
    assert f"'cwd': '{folder}" in told
    model.close()
    assert not folder.exists()


def test_an_answer_that_is_too_large_is_an_error_before_it_is_read(opened):
    with pytest.raises(InvalidData, match="exceeds the limit"):
        opened("if call == 'forward': result = {'y': np.ones(1000)}", answer_bytes=4096).forward(X)


def test_rubbish_instead_of_an_answer_is_an_error(opened):
    code = """
if call == "forward":
    for number in range(3, 20):
        try:
            os.write(number, bytes([9, 0, 0, 0] + [0] * 8 + [193] * 9))
        except OSError:
            pass
"""
    with pytest.raises(InvalidData, match="malformed"):
        opened(code).forward(X)


def test_the_children_of_the_process_end_with_it(opened):
    code = "import subprocess\nif call == 'forward': result = {'y': np.array([subprocess.Popen(['sleep', '60']).pid])}"
    model = opened(code)
    pid = int(model.forward(X)["y"][0])
    assert alive(pid)
    model.close()
    assert ends(pid)


def test_no_descriptor_or_folder_remains(opened, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    model = opened("if call == 'forward': raise SystemExit")
    for _ in range(2):
        with pytest.raises(PenstockError, match="ended with status 0"):
            model.forward(X)
    model.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not list((tmp_path / "tmp").iterdir())


def test_an_interrupt_leaves_nothing(opened, tmp_path):
    model = opened("import time\nif call == 'forward': os.kill(os.getppid(), 2); time.sleep(60)")
    pid = model._process._popen.pid
    with pytest.raises(KeyboardInterrupt):
        model.forward(X)
    assert ends(pid)
    assert not list((tmp_path / "tmp").iterdir())
