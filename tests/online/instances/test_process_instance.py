from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import models
from conformance.engines import EngineConformance, values
from penstock.artifact import Artifact
from penstock.clock import ManualClock
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import Code, InvalidInput, InvalidModel, PenstockError, Unavailable
from penstock.online.instances.process_halt import Halt
from penstock.online.instances.process_instance import InstanceRestarting, ProcessModel
from penstock.online.scheduler.base import InstanceDied
from penstock.tensor import Array, DataType, TensorSpec

PATIENCE_S = 30
OPTIONS = {"threads": 1, "spinning": False}
X = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}


class Loader:
    """Loads models, and unloads them at the end."""

    def __init__(self) -> None:
        self.models: list[ProcessModel] = []

    def __call__(self, artifact: Artifact, options: Mapping[str, Any] = OPTIONS, **more: Any) -> ProcessModel:
        file = artifact.in_memory()
        try:
            model = ProcessModel.load("onnxruntime", artifact, options, file, **more)
        finally:
            os.close(file)
        self.models.append(model)
        return model


@pytest.fixture
def load() -> Iterator[Loader]:
    loader = Loader()
    yield loader
    for model in loader.models:
        model.unload()


class Isolated(OnnxRuntimeEngine):
    """ONNX Runtime, with each model in a separate process."""

    def __init__(self) -> None:
        self.loaded = Loader()

    def load(self, artifact: Artifact, options: Mapping[str, Any]) -> Any:
        return self.loaded(artifact, options)


class TestConformance(EngineConformance):
    engine = Isolated()
    rejects = True

    @pytest.fixture(autouse=True)
    def _unload(self) -> Iterator[None]:
        yield
        while self.engine.loaded.models:
            self.engine.loaded.models.pop().unload()


def turns() -> Artifact:
    """``y = n``, computed by a loop of ``n`` iterations."""
    scalar = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Identity", ["state"], ["next"])],
        "body",
        [
            scalar("turn", TensorProto.INT64, []),
            scalar("go", TensorProto.BOOL, []),
            scalar("state", TensorProto.INT64, []),
        ],
        [scalar("on", TensorProto.BOOL, []), scalar("next", TensorProto.INT64, [])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["n", "", "n"], ["y"], body=body)],
        "turns",
        [scalar("n", TensorProto.INT64, [])],
        [scalar("y", TensorProto.INT64, [])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return Artifact.from_bytes(model.SerializeToString())


def for_ever() -> dict[str, Array]:
    return {"n": np.array(2**60)}


def until(condition: Callable[[], bool]) -> None:
    """Poll until ``condition`` holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])


def call(model: ProcessModel, inputs: Mapping[str, Array]) -> Future[dict[str, Array]]:
    """Call ``forward`` on a thread, and return when the process has begun the call."""
    assert model.pid
    before, future = cpu_ticks(model.pid), Future[dict[str, Array]]()

    def run() -> None:
        try:
            future.set_result(model.forward(inputs))
        except PenstockError as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    pid = model.pid
    until(lambda: cpu_ticks(pid) > before + 2)
    return future


def until_restarted(model: ProcessModel, first: int | None) -> None:
    until(lambda: model.pid not in (None, first))


def kill(model: ProcessModel, number: int = signal.SIGKILL) -> None:
    assert model.pid
    os.kill(model.pid, number)


@pytest.mark.parametrize("datatype", list(DataType), ids=lambda datatype: datatype.value)
def test_answers_are_the_engine_s_own_bit_for_bit(load: Loader, datatype: DataType) -> None:
    artifact = models.identity(datatype)
    inputs = {"x": values(datatype)}
    here = OnnxRuntimeEngine().load(artifact, OPTIONS).forward(inputs)["y"]
    there = load(artifact).forward(inputs)["y"]
    assert there.dtype == here.dtype
    assert there.tolist() == here.tolist() if datatype is DataType.BYTES else there.tobytes() == here.tobytes()
    assert there.flags.writeable
    assert there.flags.owndata or datatype is DataType.BYTES


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_death_fails_the_batch_that_ran_and_no_other(load: Loader, number: int) -> None:
    model = load(turns())
    first = model.pid
    batch = call(model, for_ever())
    kill(model, number)
    with pytest.raises(InstanceDied, match="died in the middle of this batch") as caught:
        batch.result(PATIENCE_S)
    assert caught.value.code is Code.INTERNAL
    until_restarted(model, first)
    assert model.healthy
    assert model.forward({"n": np.array(5)})["y"] == 5
    assert not Path(f"/proc/{first}").exists(), "no zombie is left"


def test_a_death_between_batches_fails_none(load: Loader) -> None:
    model = load(models.linear())
    expected, first = model.forward(X)["y"], model.pid
    kill(model)
    until_restarted(model, first)
    np.testing.assert_array_equal(model.forward(X)["y"], expected)


def test_a_call_that_hangs_is_ended(load: Loader) -> None:
    model = load(turns(), timeout_s=1.0)
    first = model.pid
    with pytest.raises(InstanceDied, match=r"took longer than 1 s, so its process was ended"):
        model.forward(for_ever())
    until_restarted(model, first)
    assert model.forward({"n": np.array(7)})["y"] == 7


def test_a_process_that_is_stopped_counts_as_one_that_hangs(load: Loader) -> None:
    model = load(models.linear(), timeout_s=1.0)
    kill(model, signal.SIGSTOP)
    with pytest.raises(InstanceDied):
        model.forward(X)


def test_repeated_deaths_are_waited_out_by_the_clock(load: Loader) -> None:
    clock = ManualClock(1000.0)
    model = load(models.linear(), clock=clock)
    first = model.pid
    kill(model)
    until_restarted(model, first)
    for delay_s in (0.5, 1.0):
        kill(model)
        until(lambda: not model.healthy)
        with pytest.raises(InstanceRestarting, match="is being restarted") as caught:
            model.forward(X)
        assert caught.value.code is Code.UNAVAILABLE
        assert caught.value.retry_after_s == pytest.approx(delay_s)
        assert not model.healthy
        clock.advance(delay_s)
        until(lambda: model.healthy)
        model.forward(X)


def test_an_error_of_the_engine_costs_no_process(load: Loader) -> None:
    model = load(models.fails_on_odd_batch())
    name, first = model.signature.input_names[0], model.pid
    shape = [2 if dim == -1 else dim for dim in model.signature.inputs[0].shape]
    odd = np.ones([3, *shape[1:]], np.float32)
    with pytest.raises(InvalidInput, match="the model rejects these inputs: Reshape") as caught:
        model.forward({name: odd})
    assert not isinstance(caught.value, InstanceDied)
    model.forward({name: np.ones(shape, np.float32)})
    assert model.pid == first


def test_a_refused_model_leaves_nothing(load: Loader) -> None:
    before = resources()
    with pytest.raises(InvalidModel, match="ONNX Runtime refuses the model"):
        load(models.unknown_operator())
    assert resources() == before


def test_unloading_gives_everything_back(load: Loader) -> None:
    before = resources()
    model = load(models.linear())
    for size in (10, 100_000):
        model.forward({"x": np.ones((size, 3), np.float32)})
    pid = model.pid
    model.unload()
    model.unload()
    assert resources() == before
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(Unavailable, match="has been unloaded"):
        model.forward(X)


class Hasty(ProcessModel):
    worker = "penstock.online.instances.python.worker"
    least_load_s = 0.2

    def _files(self) -> tuple[int, ...]:
        return *super()._files(), self._inputs.file, self._outputs.file


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Callable[..., Hasty]]:
    """Loads a model whose load never ends; each call takes the code to run first."""
    file = os.memfd_create("model")

    def load(before: str = "", **more: Any) -> Hasty:
        (tmp_path / "model.py").write_text(f"{before}\nwhile True: pass")
        os.write(file, (tmp_path / "model.py").read_bytes())
        return Hasty.load("python", Artifact.from_file(tmp_path / "model.py"), {}, file, **more)

    yield load
    os.close(file)


def test_a_load_that_takes_too_long_is_ended(endless: Callable[..., Hasty]) -> None:
    before = resources()
    with pytest.raises(PenstockError, match=r"took longer than 0\.2 s to load") as caught:
        endless(timeout_s=0.1)
    assert "'model_timeout_s'" in caught.value.hint
    assert resources() == before


def test_a_load_is_ended_at_once(endless: Callable[..., Hasty], tmp_path: Path) -> None:
    before, halt = resources(), Halt()
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(endless, f"open({str(tmp_path / 'begun')!r}, 'w').close()", halt=halt)
        until((tmp_path / "begun").exists)
        halt.end("a test ends it")
        with pytest.raises(PenstockError, match="ended with signal SIGKILL"):
            loading.result(PATIENCE_S)
    with pytest.raises(Unavailable, match="a test ends it"):
        endless(halt=halt)
    assert resources() == before


def test_the_cpu_time_of_a_process_tells_whether_it_works(endless: Callable[..., Hasty], load: Loader) -> None:
    halt = Halt()
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(endless, halt=halt)
        until(lambda: (halt.used_s() or 0) > 0.1)
        halt.end("the test ends it")
        with pytest.raises(PenstockError):
            loading.result(PATIENCE_S)
    model = load(models.linear())
    assert model.pid
    kill(model, signal.SIGSTOP)
    until(lambda: "\nState:\tT" in Path(f"/proc/{model.pid}/status").read_text())
    assert model.used_s() == model.used_s() != 0
    kill(model, signal.SIGCONT)
    assert model.forward(X)


def test_what_has_loaded_is_ended_no_more(load: Loader) -> None:
    halt = Halt()
    model = load(models.linear(), halt=halt)
    halt.release(model)
    halt.end("a test")
    assert model.forward(X)


def test_unloading_does_not_wait_for_the_next_attempt(load: Loader) -> None:
    before = resources()
    model = load(models.linear(), clock=ManualClock())
    first = model.pid
    kill(model)
    until_restarted(model, first)
    kill(model)
    until(lambda: not model.healthy)
    model.unload()
    assert resources() == before


def test_unloading_ends_a_process_that_does_not_listen(load: Loader) -> None:
    model = load(models.linear())
    pid = model.pid
    kill(model, signal.SIGSTOP)
    model.unload()
    assert not Path(f"/proc/{pid}").exists()


def resources() -> tuple[int, int, int]:
    """Open descriptors, mapped memfds, threads."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), len(re.findall("memfd:penstock", maps)), threading.active_count()


def test_the_weights_are_not_in_the_server_s_memory(load: Loader) -> None:
    size = 64 << 20
    artifact = models.linear(rows=size // 4 // 64, columns=64)
    before = resident_bytes("self")
    model = load(artifact)
    assert model.pid
    assert resident_bytes(model.pid) > size
    assert resident_bytes("self") - before < size // 4


def resident_bytes(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_several_instances_answer_at_once_each_its_own(load: Loader) -> None:
    instances = [load(models.increment(DataType.INT64)) for _ in range(3)]

    def ask(number: int) -> None:
        model = instances[number]
        spec = model.signature.inputs[0]
        for turn in range(200):
            array = np.full([turn % 5 + 1, *spec.shape[1:]], number * 1000 + turn, np.int64)
            np.testing.assert_array_equal(model.forward({spec.name: array})[model.signature.output_names[0]], array + 1)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(ask, range(3)))


def test_it_runs_on_its_own_cores(load: Loader) -> None:
    core = max(os.sched_getaffinity(0))
    model = load(models.linear(), cores=(core,))
    assert model.pid
    assert os.sched_getaffinity(model.pid) == {core}


def test_the_signals_of_a_terminal_do_not_reach_it(load: Loader) -> None:
    model = load(models.linear())
    first = model.pid
    for number in (signal.SIGINT, signal.SIGTERM):
        kill(model, number)
    model.forward(X)
    assert model.pid == first


def test_it_takes_no_module_from_the_folder_that_the_server_is_in(
    load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    load(models.linear()).forward(X)


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_parent(busy: bool) -> None:
    code = (
        "import os, sys, threading, time; sys.path[:0] = sys.argv[1:]\n"
        "from test_process_instance import *\n"
        "model = Loader()(turns())\n"
        "if sys.argv[-1] == 'True': call(model, for_ever())\n"
        "print(model.pid, flush=True)\n"
        "signal.pause()\n"
    )
    paths = [str(Path(__file__).parent), str(Path(models.__file__).parent), str(busy)]
    parent = subprocess.Popen([sys.executable, "-c", code, *paths], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert select.select([child], [], [], PATIENCE_S)[0], "it has ended"
    os.close(child)


def test_inputs_with_a_value_of_the_models_own_need_not_be_given(load: Loader) -> None:
    artifact = models.artifact(
        [("Add", ["x", "w"], ["y"])],
        [("x", DataType.FP32.onnx, [1]), ("w", DataType.FP32.onnx, [1])],
        [("y", DataType.FP32.onnx, [1])],
        {"w": np.array([3], np.float32)},
    )
    model = load(artifact)
    assert model.optional_inputs == (TensorSpec("w", DataType.FP32, (1,)),)
    one = np.ones(1, np.float32)
    assert model.forward({"x": one})["y"] == 4
    assert model.forward({"x": one, "w": one})["y"] == 2
