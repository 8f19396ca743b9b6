import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fake_worker
from penstock.errors import (
    DeadlineExceeded,
    InvalidArgument,
    InvalidData,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
)
from penstock.offline.convert.base import ConvertOptions, Exported, InputSpec, TensorLink, UnsupportedOperators
from penstock.offline.convert.worker.process import Limits
from penstock.offline.convert.worker.remote import open_remote
from penstock.tensor import DataType

NO_OPTIONS = ConvertOptions()
X = {"x": np.array([[1, 2]], np.float32)}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """The process finds the fake converter, and its folders are where a test can count them."""
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_worker.__file__).parent))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def opened(tmp_path):
    """Opens a source that runs ``code`` in each call."""
    with contextlib.ExitStack() as sources:

        def start(code="", options=NO_OPTIONS, **limits):
            path = tmp_path / "source"
            path.write_text(code)
            return sources.enter_context(
                open_remote("fake", path, options, limits=Limits(**limits), program="fake_worker")
            )

        yield start


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def ends(pid: int) -> bool:
    """True once the process has ended, which its parent may learn a little later."""
    until = time.monotonic() + 20
    while alive(pid) and time.monotonic() < until:
        os.sched_yield()
    return not alive(pid)


def test_a_remote_model_does_what_the_model_does(opened, tmp_path):
    model = opened()
    assert (model.framework, model.version) == ("Fake", "1.0")
    assert model.signature.input_names == ["x"]
    assert model.axes["x"][0].name == "batch"
    np.testing.assert_array_equal(model.forward(X)["y"], [[2, 4]])
    assert list(model.values(X, ["double", "other"])) == ["double"]
    exported = model.export(tmp_path / "model.onnx", 19)
    assert exported == Exported("fake 1.0", (TensorLink("y", "double", "line 3"),), ("Dropout",), ("be careful",))
    assert (tmp_path / "model.onnx").read_bytes() == b"ONNX 19"


def test_every_option_arrives(opened):
    options = ConvertOptions(
        (InputSpec("x", DataType.FP32, ("N", 2)), InputSpec("z", None, None)),
        {"x": np.ones((3, 2), np.float32)},
        {"x": {0: "batch"}},
        17,
        ("y",),
        Path("weights"),
        True,
        Path("ops.py"),
    )
    code = """
if call == "forward":
    assert self.options.sample.pop("x").tolist() == [[1, 1]] * 3
    result = {"told": np.array([repr(self.options).encode()], object)}
"""
    (told,) = opened(code, options).forward(X)["told"]
    for part in ("InputSpec(name='x'", "('N', 2)", "{0: 'batch'}", "opset=17", f"{Path('ops.py').absolute()!r}"):
        assert part in told.decode()


def test_values_without_a_datatype_of_the_protocol_are_left_out(opened):
    assert opened().values(X, ["phase", "name"])["name"].tolist() == [b"a"]


def test_probes_arrive(opened):
    assert list(opened().probes(0)) == []
    code = (
        "if call == 'probes': result = [{'x': np.full((2, 2), seed, np.float32)}, {'x': np.zeros((1, 2), np.float32)}]"
    )
    first, second = opened(code).probes(7)
    assert first["x"].tolist() == [[7, 7], [7, 7]]
    assert second["x"].shape == (1, 2)


def test_the_number_of_probes_is_limited(opened):
    code = "if call == 'probes': result = [{'x': np.zeros((1, 2), np.float32)}] * 1000"
    assert len(opened(code).probes(0)) <= 100


def test_large_arrays_and_much_text_pass_at_the_same_time(opened):
    x = np.arange(3_000_000, dtype=np.float32).reshape(-1, 2)
    model = opened("print('noise ' * 1_000_000)")
    np.testing.assert_array_equal(model.forward({"x": x})["y"], x * 2)


def test_arrays_can_be_written(opened):
    """Some frameworks warn about arrays that are read-only."""
    found = opened("if call == 'forward': inputs['x'] += 1").forward(X)["y"]
    found += 1
    np.testing.assert_array_equal(found, [[5, 7]])


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        ("from penstock.errors import NotFound; raise NotFound('no file', 'check it')", NotFound, "no file (check it)"),
        ("from penstock.errors import PermissionDenied; raise PermissionDenied('no')", PermissionDenied, "no"),
        ("raise ValueError('bad value\\nmore')", PenstockError, "ValueError: bad value (check"),
        ("raise MemoryError", ResourceExhausted, "more memory"),
        ("1 / 0", PenstockError, "ZeroDivisionError: division by zero"),
        ("raise ValueError('\\udcff')", PenstockError, "ValueError: \\udcff"),
        ("from penstock.errors import NotFound; raise NotFound('\\udcff')", NotFound, "\\udcff"),
    ],
)
def test_errors_keep_their_class(opened, raised, kind, message):
    with pytest.raises(kind) as caught:
        opened(raised)
    assert type(caught.value) is kind
    assert message in str(caught.value)


def test_unsupported_operators_are_listed(opened):
    code = """
from penstock.offline.convert.base import UnsupportedOperator, UnsupportedOperators
if call == "export":
    raise UnsupportedOperators.of([UnsupportedOperator("fft", "line 3", "use stft"), UnsupportedOperator("lu", "", "avoid it")])
"""
    with pytest.raises(UnsupportedOperators, match="2 operator") as caught:
        opened(code).export(Path("model.onnx"), 17)
    assert [one.op for one in caught.value.operators] == ["fft", "lu"]
    assert caught.value.hint == "use stft"


def test_an_error_of_one_call_does_not_affect_the_next(opened):
    model = opened("if call == 'forward' and inputs['x'][0, 0] > 1: raise ValueError('too large')")
    with pytest.raises(PenstockError, match="too large"):
        model.forward({"x": X["x"] * 4})
    np.testing.assert_array_equal(model.forward(X)["y"], [[2, 4]])


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


def test_memory_is_limited(opened):
    code = "if call == 'forward': result = {'y': np.ones(1 << 30)}"
    with pytest.raises(PenstockError, match="Unable to allocate|more memory"):
        opened(code, memory_bytes=1 << 30).forward(X)


def test_a_death_by_lack_of_memory_says_so(opened):
    code = "if call == 'forward': os.write(2, b'terminate called: std::bad_alloc'); os.abort()"
    with pytest.raises(ResourceExhausted, match=r"more memory than 0.5 GiB"):
        opened(code, memory_bytes=1 << 29).forward(X)


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


def test_a_link_in_the_export_is_not_followed(opened, tmp_path):
    with pytest.raises(PenstockError, match=r"'zdata', which is not a regular file"):
        opened("if call == 'export': os.symlink('/etc/passwd', target.with_name('zdata'))").export(
            tmp_path / "m.onnx", 17
        )
    assert not list(tmp_path.glob("*.onnx"))


@pytest.mark.parametrize(
    "code",
    [
        "self.axes = {'y': self.axes['x']}",
        "self.axes = {'x': (self.axes['x'][0].__class__(5, 'n'),)}",
        "self.signature = self.signature.__class__(self.signature.inputs * 2, ())",
    ],
)
def test_an_inconsistent_description_is_an_error(opened, code):
    with pytest.raises(PenstockError, match="inconsistently"):
        opened(code)


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


def test_a_source_that_was_removed_is_an_error_of_the_next_process(opened, tmp_path):
    model = opened("if call == 'forward': raise SystemExit")
    (tmp_path / "source").unlink()
    for message in ("ended with status 0", "FileNotFoundError", "FileNotFoundError"):
        with pytest.raises(PenstockError, match=message):
            model.forward(X)


def test_closing_twice_is_fine_and_a_closed_model_says_so(opened):
    model = opened()
    model.close()
    model.close()
    with pytest.raises(InvalidArgument, match="closed"):
        model.forward(X)


def test_an_interrupt_leaves_nothing(opened, tmp_path):
    model = opened("import time\nif call == 'forward': os.kill(os.getppid(), 2); time.sleep(60)")
    pid = model._process._popen.pid
    with pytest.raises(KeyboardInterrupt):
        model.forward(X)
    assert ends(pid)
    assert not list((tmp_path / "tmp").iterdir())


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
