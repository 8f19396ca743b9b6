from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from penstock.engines.base import RequestModel
from penstock.errors import Code, InvalidArgument
from penstock.online.instances.process_instance import InstanceRestarting
from penstock.online.instances.python.process import PythonProcess, add_up
from penstock.online.scheduler.base import InstanceDied
from penstock.request import InferRequest
from penstock.telemetry.statistics import ModelStatistics, OwnMetric
from python_models import HEAD, IDENTITY, Answers, Processes, ask, config, decoupled, failure, request

PATIENCE_S = 30


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.end()


MIXED = """
def execute(self, requests):
    answers = []
    for one in requests:
        x = one.inputs()[0].as_numpy()
        error = None
        if x[0, 0] == 1:
            error = pb_utils.TritonError("one is refused", pb_utils.TritonError.INVALID_ARG)
        elif x[0, 0] == 2:
            error = pb_utils.TritonError("two fails")
        answers.append(pb_utils.InferenceResponse([] if error else [pb_utils.Tensor("y", x + 1)], error))
    return answers
"""

TELLS = """
def execute(self, requests):
    said = [
        [one.request_id(), one.correlation_id(), one.parameters(), one.requested_output_names(), one.flags()]
        for one in requests
    ]
    import json
    text = np.array([json.dumps(said).encode()], np.object_)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("y", text)]) for one in requests]
"""

STRINGS = {
    "max_batch": 0,
    "config": {
        "input": [{"name": "x", "data_type": "TYPE_STRING", "dims": [-1]}],
        "output": [{"name": "y", "data_type": "TYPE_STRING", "dims": [-1]}],
    },
}


def test_requests_are_answered_each_by_itself(processes: Processes) -> None:
    model = processes.load(IDENTITY)
    assert isinstance(model, RequestModel)
    assert model.max_batch == 8
    assert not model.decoupled
    assert model.signature.inputs[0].shape == (-1, 2)
    first, second = ask(model, [request(1), request(2, 3)])
    np.testing.assert_array_equal(first["y"], [[1, 1]])
    np.testing.assert_array_equal(second["y"], [[2, 2], [3, 3]])


def test_an_error_is_told_to_its_own_request(processes: Processes) -> None:
    outcomes = ask(processes.load(MIXED), [request(0), request(1), request(2)])
    np.testing.assert_array_equal(outcomes[0]["y"], [[1, 1]])
    assert isinstance(outcomes[1], InvalidArgument)
    assert outcomes[1].message == "one is refused"
    assert (outcomes[2].code, outcomes[2].message) == (Code.INTERNAL, "two fails")


def test_what_a_model_sees_of_a_request(processes: Processes) -> None:
    options = config()
    options["config"]["output"] = [{"name": "y", "data_type": "TYPE_STRING", "dims": [1]}]
    model = processes.load(TELLS, options)
    asked = request(1, id="a", parameters={"sequence_id": 7, "sequence_end": True, "mood": "good"})
    (outcome,) = ask(model, [asked])
    ((name, correlation, parameters, outputs, flags),) = json.loads(outcome["y"][0])
    assert (name, correlation, json.loads(parameters), outputs, flags) == ("a", 7, {"mood": "good"}, ["y"], 2)


def test_strings_are_object_arrays_of_bytes(processes: Processes) -> None:
    body = """
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        assert x.dtype == np.object_ and isinstance(x[0], bytes)
        y = np.array([x[0] + b"!", "ü", ""], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]
    """
    (outcome,) = ask(processes.load(body, STRINGS), [InferRequest("m", {"x": np.array([b"a\0"], object)})])
    assert outcome["y"].tolist() == [b"a\0!", "ü".encode(), b""]


@pytest.mark.parametrize("element", ["1", "[b'a']", "None"])
def test_bytes_outputs_hold_bytes(processes: Processes, element: str) -> None:
    body = f"""
    def execute(self, requests):
        y = np.empty(1, object)
        y[0] = {element}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]
    """
    (outcome,) = ask(processes.load(body, STRINGS), [InferRequest("m", {"x": np.array([b"a"], object)})])
    assert "must contain bytes or text" in outcome.message


def test_a_traceback_is_logged_and_not_told(processes: Processes, caplog: pytest.LogCaptureFixture) -> None:
    model = processes.load("def execute(self, requests):\n    return self.missing")
    message = failure(model, [request(1)])
    assert message.endswith("'TritonPythonModel' object has no attribute 'missing'")
    assert "model.py" not in message
    assert 'model.py", line 8, in execute' in caplog.text


def test_a_long_traceback_is_logged_without_its_middle(processes: Processes, caplog: pytest.LogCaptureFixture) -> None:
    failure(
        processes.load("def execute(self, requests):\n    raise ValueError('x' * 100_000 + 'the end')"), [request(1)]
    )
    (message,) = [message for message in caplog.messages if "Traceback" in message]
    assert 'model.py", line 8, in execute' in message
    assert message.endswith("xxthe end")
    assert len(message) <= 8192


COUNTS = """
def initialize(self, args):
    self.threads = []

def execute(self, requests):
    for one in requests:
        thread = threading.Thread(target=self.count, args=(one, one.get_response_sender()))
        self.threads.append(thread)
        thread.start()

def count(self, request, sender):
    x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
    for number in range(int(x[0, 0])):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + number)]))
        if request.is_cancelled():
            break
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

def finalize(self):
    for thread in self.threads:
        thread.join()
"""
THREADS = "import threading\n"


HEEDLESS = """
def execute(self, requests):
    for one in requests:
        x, sender = pb_utils.get_input_tensor_by_name(one, "x").as_numpy(), one.get_response_sender()
        for number in range(int(x[0, 0])):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + number)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_responses_that_nobody_wants_do_not_leave_the_model_s_process(processes: Processes) -> None:
    model = processes.load(HEEDLESS, decoupled())
    answers = Answers(wanted=2)
    model.execute([request(50)], answers)
    assert len(answers.all()) == answers.count == 2


def test_a_decoupled_model_answers_several_requests_from_threads_after_it_has_executed(processes: Processes) -> None:
    model = processes.load(COUNTS, decoupled(), head=THREADS + HEAD)
    assert model.decoupled
    streams = [Answers() for _ in range(3)]
    for number, answers in enumerate(streams):
        model.execute([request(number + 3)], answers)
    for number, answers in enumerate(streams):
        values = [outcome["y"][0, 0] for outcome in answers.all()]
        assert values == [number + 3 + i for i in range(number + 3)]


def test_a_decoupled_model_sees_that_nobody_wants_more(processes: Processes) -> None:
    model = processes.load(COUNTS, decoupled(), head=THREADS + HEAD)
    answers = Answers(wanted=2)
    model.execute([request(1000)], answers)
    assert len(answers.all()) == 2


SENDS = """
def execute(self, requests):
    import threading
    for one in requests:
        threading.Thread(target=self.send, args=(one.inputs()[0].as_numpy(), one.get_response_sender())).start()

def send(self, x, sender):
    import sys
    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
    {}
"""


@pytest.mark.parametrize(
    "end", ["sys.exit()", "cycle = [sender]; cycle.append(cycle); del sender, cycle; import gc; gc.collect()"]
)
def test_a_request_whose_sender_is_lost_ends(processes: Processes, end: str) -> None:
    model, answers = processes.load(SENDS.format(end), decoupled()), Answers()
    model.execute([request(1)], answers)
    first, last = answers.all()
    assert first["y"].tolist() == [[1, 1]]
    assert str(last).endswith("message: the model dropped its response sender before the final flag")


def test_open_streams_end_before_the_process(processes: Processes) -> None:
    body = SENDS.format("sender.send(flags=1)").replace("    import sys", "    import time; time.sleep(0.3)")
    model, answers = processes.load(body, decoupled()), Answers()
    model.execute([request(1)], answers)
    model.unload()
    assert [outcome["y"][0, 0] for outcome in answers.all()] == [1]


def test_streams_that_nobody_wants_do_not_keep_the_process(processes: Processes) -> None:
    body = """
    def execute(self, requests):
        self.senders = [one.get_response_sender() for one in requests]
    """
    model = processes.load(body, decoupled())
    model.execute([request(1)], Answers(wanted=0))
    model.unload()
    assert model.pid is None


def test_a_sender_is_closed_by_the_final_flag(processes: Processes) -> None:
    body = """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        sender.send(flags=1)
        try:
            sender.send(flags=1)
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_error(str(error))
    """
    answers = Answers()
    processes.load(body, decoupled()).execute([request(1)], answers)
    assert answers.all() == []


def test_a_model_that_is_not_decoupled_may_use_its_sender_once(processes: Processes) -> None:
    body = """
    def execute(self, requests):
        for one in requests:
            x = one.inputs()[0].as_numpy()
            one.get_response_sender().send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]), 1)
    """
    (outcome,) = ask(processes.load(body), [request(4)])
    assert outcome["y"][0, 0] == 4


DIES = """
def execute(self, requests):
    x = requests[0].inputs()[0].as_numpy()
    if x[0, 0] == 0:
        import os
        os._exit(3)
    while x[0, 0] == 1:
        pass
    return [pb_utils.InferenceResponse([pb_utils.Tensor("y", one.inputs()[0].as_numpy())]) for one in requests]
"""


def ask_restarted(model: PythonProcess, asked: InferRequest) -> list[Any]:
    """The outcomes once the model's process has been restarted, which may take some seconds on a busy machine."""
    for _ in range(30):
        with suppress(InstanceRestarting):
            return ask(model, [asked])
    return ask(model, [asked])


def test_a_death_costs_its_batch_only(processes: Processes) -> None:
    model = processes.load(DIES)
    with pytest.raises(InstanceDied, match="died in the middle of this batch"):
        ask(model, [request(0), request(2)])
    assert ask_restarted(model, request(2))[0]["y"][0, 0] == 2


def test_a_hang_is_ended(processes: Processes) -> None:
    model = processes.load(DIES, timeout_s=0.5)
    with pytest.raises(InstanceDied, match=r"took longer than 0\.5 s"):
        ask(model, [request(1)])
    assert ask_restarted(model, request(2))[0]["y"][0, 0] == 2


def test_a_process_that_says_what_cannot_be_is_ended(processes: Processes) -> None:
    body = """
    def execute(self, requests):
        from penstock.online.instances.python.host import here
        if requests[0].inputs()[0].as_numpy()[0, 0] < 2:
            here.host._channel.socket.sendall(b"\\1\\0\\0\\0x")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", one.inputs()[0].as_numpy())]) for one in requests]
    """
    model = processes.load(body)
    with pytest.raises(InstanceDied):
        ask(model, [request(1)])
    assert ask_restarted(model, request(2))[0]["y"][0, 0] == 2


def test_loading_and_unloading_leaves_nothing(processes: Processes) -> None:
    def held() -> tuple[int, int]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return len(os.listdir("/proc/self/fd")), len(children)

    processes.load(IDENTITY).unload()
    before, threads = held(), threading.active_count()
    for _ in range(5):
        model = processes.load(IDENTITY)
        ask(model, [request(1)])
        model.unload()
    assert held() == before
    assert threading.active_count() <= threads


def test_a_model_keeps_metrics_of_itself(processes: Processes) -> None:
    body = """
    def initialize(self, args):
        def family(kind):
            return pb_utils.MetricFamily(name=f"own_{kind}", description="Own", kind=kind)
        self.count = family(pb_utils.MetricFamily.COUNTER).Metric(labels={"a": 'b"'})
        self.level = family(pb_utils.MetricFamily.GAUGE).Metric()
        self.level.set(4)

    def execute(self, requests):
        self.count.increment(2)
        self.level.increment(-1)
        y = np.array([[self.count.value(), self.level.value()]], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for one in requests]
    """
    models = [processes.load(body) for _ in range(2)]
    statistics = ModelStatistics()
    add_up(statistics, models)
    assert statistics.metrics["own_gauge"] == OwnMetric("gauge", "Own", {"": 8})
    for model in models:
        assert [ask(model, [request(1)])[0]["y"][0].tolist() for _ in range(2)] == [[2, 3], [4, 2]]
    add_up(statistics, models)
    assert statistics.metrics == {
        "own_counter": OwnMetric("counter", "Own", {'a="b\\""': 8}),
        "own_gauge": OwnMetric("gauge", "Own", {"": 4}),
    }


def test_a_death_ends_open_streams(processes: Processes) -> None:
    body = """
    def execute(self, requests):
        self.senders = [one.get_response_sender() for one in requests]
    """
    model, answers = processes.load(body, decoupled()), Answers()
    model.execute([request(1)], answers)
    assert model.pid is not None
    os.kill(model.pid, signal.SIGKILL)
    assert [str(error) for error in answers.all()] == ["the model's process died before its last answer"]


def test_it_is_finalised(processes: Processes, tmp_path: Path) -> None:
    mark = tmp_path / "finalised"
    model = processes.load(IDENTITY + f"\ndef finalize(self):\n    open({str(mark)!r}, 'w').close()")
    model.unload()
    assert mark.exists()


def test_initialize_is_told_how_it_is_served(processes: Processes, caplog: pytest.LogCaptureFixture) -> None:
    body = """
    def initialize(self, args):
        import json, os
        config = json.loads(args.pop("model_config"))
        assert config["input"][0]["data_type"] == "TYPE_FP32"
        assert pb_utils.get_output_config_by_name(config, "y")["dims"] == [2]
        assert pb_utils.triton_string_to_numpy("TYPE_FP32") is np.float32
        assert os.path.exists(os.path.join(pb_utils.get_model_dir(), "model.py"))
        assert os.path.dirname(pb_utils.get_model_dir()) == args.pop("model_repository")
        pb_utils.Logger.log_warn(json.dumps(args))
    """
    processes.load(dedent(body) + IDENTITY, {**config(), "instance": "m_0", "version": "3"})
    said = json.loads(caplog.messages[-1].removeprefix("model 'm': "))
    assert said == {
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_instance_name": "m_0",
        "model_version": "3",
        "model_name": "m",
    }


def test_modules_beside_the_model_are_found_and_its_own(processes: Processes, tmp_path: Path) -> None:
    for number in range(2):
        version = tmp_path / str(number) / "1"
        version.mkdir(parents=True)
        (version / "near.py").write_text(f"VALUE = {number}.0")
        (version.parent / "far.py").write_text("from near import VALUE")
    body = IDENTITY.replace('"x").as_numpy()', '"x").as_numpy() + VALUE')
    head = "from far import VALUE\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\nclass TritonPythonModel:\n"
    models = [processes.load(body, head=head) for _ in range(2)]
    assert [ask(model, [request(1)])[0]["y"][0, 0] for model in models] == [1, 2]


def test_the_child_imports_no_engine(processes: Processes) -> None:
    body = """
    def initialize(self, args):
        import sys
        heavy = {"onnxruntime", "onnx", "torch", "google.protobuf", "httptools", "typer"} & set(sys.modules)
        assert not heavy, heavy
    """
    assert processes.load(dedent(body) + IDENTITY).healthy
