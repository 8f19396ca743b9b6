from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from penstock.engines.base import RequestModel
from penstock.errors import Code, InvalidArgument, InvalidModel, NotFound, PenstockError
from penstock.online.scheduler.instance import InstanceDied
from penstock.online.scheduler.model_calls import ModelCall
from penstock.online.scheduler.python_process import PythonProcess
from penstock.request import Done, InferRequest, InferResponse
from python_models import HEAD, Processes, ask, config, request

PATIENCE_S = 30


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.end()


def failure(model: PythonProcess, requests: list[InferRequest]) -> str:
    """What the one request is told, or all are."""
    try:
        (outcome,) = ask(model, requests)
    except PenstockError as error:
        outcome = error
    assert isinstance(outcome, PenstockError)
    return outcome.message


IDENTITY = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(one, "x").as_numpy())])
        for one in requests
    ]
"""

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


WRONG = {
    "no list": ("return None", "expected a list in the execute return, found type 'NoneType'"),
    "too few": ("return []", r"InferenceRequest\(s\) size is:1, and InferenceResponse\(s\) size is:0"),
    "None": ("return [None]", "Expected an 'InferenceResponse' object in the execute function return list"),
    "another type": ("return [1]", "found type 'int'"),
    "no output": ("return [pb_utils.InferenceResponse([])]", "gave no output 'y'"),
    "another output": ('return [answer("z", x)]', "gave the output 'z', which its configuration does not have"),
    "another dtype": ('return [answer("y", x.astype(np.int8))]', "output 'y' is INT8, and must be FP32"),
    "no dtype of ours": ('return [answer("y", x.astype(complex))]', "output 'y' is of dtype complex128"),
    "objects": ('return [answer("y", x.astype(object))]', "output 'y' is BYTES, and must be FP32"),
    "too large": ('return [answer("y", np.broadcast_to(np.float32(0), (1 << 40, 2)))]', "tensors of .* bytes are more"),
    "an exception": ("raise ValueError('bad value')", "message: ValueError: bad value$"),
    "an exit": ("raise SystemExit(3)", "message: SystemExit: 3$"),
    "no tensor": ('return [answer("y", [1])]', "tensor 'y' needs a numpy array, not a list"),
}


CODED = """
import json
import numpy as np
import penstock
import triton_python_backend_utils as pb_utils
from penstock import Tensor

def answer(name, array):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)])

class TritonPythonModel:
    def execute(self, requests):
        names = dict(globals())
        exec("def run(requests, x):\\n    " + json.loads(requests[0].parameters())["code"], names)
        return names["run"](requests, requests[0].inputs()[0].as_numpy())
"""
"""Runs the code that its request brings."""


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonProcess]:
    processes = Processes(tmp_path_factory.mktemp("coded"))
    yield processes.load(CODED, head="", options=config())
    processes.end()


@pytest.fixture(scope="module")
def coded_stream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonProcess]:
    processes = Processes(tmp_path_factory.mktemp("coded_stream"))
    yield processes.load(CODED, head="", options=decoupled())
    processes.end()


def code_request(code: str) -> InferRequest:
    return request(5, parameters={"code": code})


@pytest.mark.parametrize("case", WRONG)
def test_wrong_answers_are_told(coded: PythonProcess, case: str) -> None:
    code, message = WRONG[case]
    assert re.search(message, failure(coded, [code_request(code)]))
    (outcome,) = ask(coded, [code_request("return [answer('y', x)]")])
    assert outcome["y"].tolist() == [[5, 5]]


@pytest.mark.parametrize("element", ["1", "[b'a']", "None"])
def test_bytes_outputs_hold_bytes(processes: Processes, element: str) -> None:
    body = f"""
    def execute(self, requests):
        y = np.empty(1, object)
        y[0] = {element}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]
    """
    (outcome,) = ask(processes.load(body, STRINGS), [InferRequest("m", {"x": np.array([b"a"], object)})])
    assert "must hold bytes or text" in outcome.message


def test_a_traceback_is_logged_and_not_told(processes: Processes, caplog: pytest.LogCaptureFixture) -> None:
    model = processes.load("def execute(self, requests):\n    return self.missing")
    message = failure(model, [request(1)])
    assert message.endswith("'TritonPythonModel' object has no attribute 'missing'")
    assert "model.py" not in message
    assert 'model.py", line 8, in execute' in caplog.text


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


class Answers:
    """Of one decoupled request; ``wanted`` is how many are."""

    def __init__(self, wanted: int = 1 << 30) -> None:
        self._wanted = wanted
        self._queue: SimpleQueue[tuple[Any, bool]] = SimpleQueue()
        self.count = 0

    def __call__(self, number: int, outcome: Any, final: bool) -> bool:
        if outcome is not None or final:
            self.count += outcome is not None
            self._queue.put((outcome, final))
        return self.count < self._wanted

    def all(self) -> list[Any]:
        outcomes = []
        while True:
            outcome, final = self._queue.get(timeout=PATIENCE_S)
            if outcome is not None:
                outcomes.append(outcome)
            if final or isinstance(outcome, PenstockError):
                return outcomes


def decoupled() -> dict[str, Any]:
    return config(model_transaction_policy={"decoupled": True})


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


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return [1]", "a decoupled model's 'execute' must return None"),
        ("return None", "took no response sender"),
        ("raise ValueError('no')", "ValueError: no"),
        ("requests[0].get_response_sender().send()", "the final flag must be set"),
        ("requests[0].get_response_sender().send(1)", "it is no InferenceResponse"),
    ],
)
def test_mistakes_of_a_decoupled_model_end_the_request(coded_stream: PythonProcess, code: str, message: str) -> None:
    answers = Answers()
    try:
        coded_stream.execute([code_request(code)], answers)
    except PenstockError as error:
        answers(0, error, True)
    assert message in str(answers.all()[0])


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


def test_a_death_costs_its_batch_only(processes: Processes) -> None:
    model = processes.load(DIES)
    with pytest.raises(InstanceDied, match="died in the middle of this batch"):
        ask(model, [request(0), request(2)])
    assert ask(model, [request(2)])[0]["y"][0, 0] == 2


def test_a_hang_is_ended(processes: Processes) -> None:
    model = processes.load(DIES, timeout_s=0.5)
    with pytest.raises(InstanceDied, match=r"took longer than 0\.5 s"):
        ask(model, [request(1)])
    assert ask(model, [request(2)])[0]["y"][0, 0] == 2


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


COMPLETES = """
@staticmethod
def auto_complete_config(config):
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2]})
    config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [2]})
    config.set_max_batch_size(16)
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": False})
    return config
"""


def test_a_model_may_complete_its_configuration(processes: Processes) -> None:
    model = processes.load(COMPLETES + IDENTITY, {})
    assert (model.max_batch, model.signature.input_names, model.decoupled) == (16, ["x"], False)
    assert ask(model, [request(4)])[0]["y"][0, 0] == 4


def test_what_is_configured_stays(processes: Processes) -> None:
    assert processes.load(COMPLETES + IDENTITY, config(4)).max_batch == 4


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        ("def nothing(self): pass", {}, "no function 'execute'"),
        (IDENTITY, {}, "not known what the model takes and gives"),
        (COMPLETES + IDENTITY, config(32), "'max_batch_size' is 32, above the model's 16"),
        (COMPLETES.replace("return config", "return None") + IDENTITY, {}, "returned no model configuration"),
        (
            "def initialize(self, args):\n    1 / 0" + IDENTITY,
            None,
            r"failed in line 8 .*ZeroDivisionError: division by",
        ),
        ("import absent_module" + IDENTITY, None, r"failed in line 7 while it was imported: ModuleNotFoundError"),
        ("def execute(self: pass", None, "it is no Python: line 7: "),
        ("import os; os._exit(1)" + IDENTITY, None, "the model's process ended while it loaded the model"),
        (IDENTITY, config(parameters={"EXECUTION_ENV_PATH": {"string_value": "e"}}), "'EXECUTION_ENV_PATH' is not"),
        (IDENTITY, config(parameters={"class": {"string_value": "Other"}}), "has no 'Other'"),
    ],
)
def test_what_cannot_be_loaded_is_told(processes: Processes, body: str, options: Any, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        processes.load(body, options)


class Server:
    """Answers what models ask, on an event loop in another thread: ``double`` doubles, ``count`` counts, others are not found."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.asked: SimpleQueue[InferRequest] = SimpleQueue()
        self.cancelled = threading.Event()

    def connect(self, model: PythonProcess) -> PythonProcess:
        model.make_call = lambda: ModelCall(self.loop, self.call)
        return model

    def call(self, request: InferRequest, done: Done, handle: object = None, decoupled: bool = False) -> Any:
        self.asked.put(request)
        if request.model_name == "double":
            self.loop.call_soon(done, InferResponse("double", "1", {"y": request.inputs["x"] * 2}))
        elif request.model_name == "count":
            for number in range(3):
                y = request.inputs["x"] + number
                self.loop.call_soon(done, InferResponse("count", "1", {"y": y}, final=False))
            self.loop.call_soon(done, InferResponse("count", "1", {}))
        elif request.model_name == "never":
            return self
        else:
            done(NotFound(f"no model '{request.model_name}'"))
        return None

    def cancel(self) -> None:
        self.cancelled.set()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def server(processes: Processes) -> Iterator[Server]:
    server = Server()
    yield server
    processes.end()
    server.end()


CALLER = """
def ask(self, x, name):
    return pb_utils.InferenceRequest(model_name=name, requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x)])

def answer(self, reply):
    if reply.has_error():
        return pb_utils.InferenceResponse(error=reply.error())
    return pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(reply, "y")])
"""

SYNC = """
def execute(self, requests):
    return [self.answer(self.ask(one.inputs()[0].as_numpy(), "{}").exec()) for one in requests]
"""

ASYNC = """
async def execute(self, requests):
    import asyncio
    asked = [self.ask(one.inputs()[0].as_numpy(), "double").async_exec() for one in requests]
    return [self.answer(reply) for reply in await asyncio.gather(*asked)]
"""

FROM_THREADS = """
def execute(self, requests):
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(8) as pool:
        replies = pool.map(lambda one: self.ask(one.inputs()[0].as_numpy(), "double").exec(), requests)
    return [self.answer(reply) for reply in replies]
"""

STREAMED = """
def execute(self, requests):
    x = requests[0].inputs()[0].as_numpy()
    total = sum(one.output_tensors()[0].as_numpy() for one in self.ask(x, "count").exec(decoupled=True))
    return [pb_utils.InferenceResponse([pb_utils.Tensor("y", total)])]
"""

STREAMED_ASYNC = """
async def execute(self, requests):
    x, total = requests[0].inputs()[0].as_numpy(), 0
    async for one in await self.ask(x, "count").async_exec(decoupled=True):
        total = total + one.output_tensors()[0].as_numpy()
    return [pb_utils.InferenceResponse([pb_utils.Tensor("y", total)])]
"""


@pytest.mark.parametrize("body", [SYNC.format("double"), ASYNC, FROM_THREADS], ids=["sync", "async", "threads"])
def test_a_model_asks_others(processes: Processes, server: Server, body: str) -> None:
    model = server.connect(processes.load(CALLER + body))
    outcomes = ask(model, [request(number) for number in range(8)])
    assert [outcome["y"][0, 0] for outcome in outcomes] == [2 * number for number in range(8)]
    assert server.asked.get().outputs == ("y",)


@pytest.mark.parametrize("body", [STREAMED, STREAMED_ASYNC], ids=["sync", "async"])
def test_a_model_asks_a_decoupled_one(processes: Processes, server: Server, body: str) -> None:
    model = server.connect(processes.load(CALLER + body))
    (outcome,) = ask(model, [request(1)])
    assert outcome["y"][0, 0] == 1 + 2 + 3


def test_large_tensors_pass_both_ways(processes: Processes, server: Server) -> None:
    model = server.connect(processes.load(CALLER + SYNC.format("double")))
    x = np.arange(2 << 20, dtype=np.float32).reshape(-1, 2)
    (outcome,) = ask(model, [InferRequest("m", {"x": x})])
    np.testing.assert_array_equal(outcome["y"], x * 2)


def test_an_error_of_another_model_is_told(processes: Processes, server: Server) -> None:
    model = server.connect(processes.load(CALLER + SYNC.format("absent")))
    (outcome,) = ask(model, [request(1)])
    assert isinstance(outcome, NotFound)
    assert outcome.message == "no model 'absent'"


def test_a_model_with_one_instance_does_not_wait_for_itself(processes: Processes, server: Server) -> None:
    model = server.connect(processes.load(CALLER + SYNC.format("m")))
    (outcome,) = ask(model, [request(1)])
    assert "has one instance, which would wait for itself" in outcome.message


def test_a_model_that_is_not_served_yet_asks_nobody(processes: Processes) -> None:
    (outcome,) = ask(processes.load(CALLER + SYNC.format("double")), [request(1)])
    assert outcome.code is Code.UNAVAILABLE


def test_a_question_ends_with_the_model(processes: Processes, server: Server) -> None:
    model = server.connect(processes.load(CALLER + SYNC.format("never")))
    failures: SimpleQueue[Exception] = SimpleQueue()

    def execute() -> None:
        try:
            ask(model, [request(1)])
        except PenstockError as error:
            failures.put(error)

    thread = threading.Thread(target=execute)
    thread.start()
    server.asked.get(timeout=PATIENCE_S)
    model.unload()
    assert isinstance(failures.get(timeout=PATIENCE_S), PenstockError)
    assert server.cancelled.wait(PATIENCE_S)
    thread.join()


SIMPLE = """
import penstock
from penstock import Context, Tensor


@penstock.model
def f(x: Tensor["FP32", -1, 2], context: Context) -> Tensor["FP32", -1]:
    with context.stage("sum"):
        if (x < 0).any():
            raise ValueError("negative")
        return x.sum(axis=1) + len(x) * 100
"""

CLASS = """
from typing import Annotated, TypedDict
import numpy as np
from penstock import Context, Tensor


class Outputs(TypedDict):
    total: Tensor["FP32", -1]
    names: Tensor["BYTES", -1]


class Model:
    def load(self, context: Context) -> None:
        self.folder, self.step = context.folder, int(context.parameters.get("step", "1"))

    def forward(self, x: Annotated[np.ndarray, Tensor("FP32", -1, 2)]) -> Outputs:
        return {"names": [str(row[0]) for row in x], "total": x.sum(axis=1) + np.float32(self.step)}

    def unload(self) -> None:
        (self.folder / "unloaded").touch()
"""


def test_a_function_is_served_in_batches(processes: Processes) -> None:
    model = processes.load(SIMPLE, {}, head="")
    assert model.max_batch is None
    assert [spec.name for spec in model.signature.outputs] == ["output"]
    outcomes = ask(model, [request(1), request(2, 3)])
    assert [outcome["output"].tolist() for outcome in outcomes] == [[302], [304, 306]]
    assert model.stages["sum"][0] == model.stages["execute"][0] == 1


def test_one_bad_value_costs_one_answer(processes: Processes) -> None:
    good, bad = ask(processes.load(SIMPLE, {}, head=""), [request(1), request(-1)])
    assert good["output"].tolist() == [102]
    assert bad.message == "the model failed: ValueError: negative"


def test_a_class_loads_and_unloads(processes: Processes, tmp_path: Path) -> None:
    options = {"config": {"parameters": {"step": {"string_value": "5"}}}}
    model = processes.load(CLASS, options, head="")
    assert model.signature.output_names == ["total", "names"]
    first, second = ask(model, [request(1), request(2)])
    assert (first["total"].tolist(), second["names"].tolist()) == ([7], [b"2.0"])
    model.unload()
    assert (tmp_path / "0" / "1" / "unloaded").exists()


RESULTS = {
    "another shape": ("return x", "shape .* and must have"),
    "another dtype": ("return x.sum(axis=1).astype('f8')", "output 'output' is FP64, and must be FP32"),
    "too many": ("return x.sum(axis=1), x", "it gave 2 outputs, and has 1"),
    "another name": ("return {'z': x}", r"it gave the outputs \['z'\], and has \['output'\]"),
    "nothing": ("return None", "output 'output' is BYTES, and must be FP32"),
}


def test_wrong_results_of_a_function_are_told(processes: Processes) -> None:
    lines = "\n".join(f"    if x[0, 0] == {n}:\n        {code}" for n, (code, _) in enumerate(RESULTS.values()))
    source = f"""
import penstock
from penstock import Tensor

@penstock.model
def f(x: Tensor["FP32", -1, 2]) -> Tensor["FP32", -1]:
{lines}
"""
    model = processes.load(source, {}, head="")
    for number, (_, message) in enumerate(RESULTS.values()):
        assert re.search(message, failure(model, [request(number)]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "neither a class 'TritonPythonModel' or 'Model' nor a function"),
        ("class Model: pass", "class 'Model' has no function 'forward'"),
        ("class Model:\n    def forward(self, x): pass", "parameter 'x' of 'forward' has no Tensor"),
        ('from penstock import Tensor\nclass Model:\n    def forward(self, x: Tensor["FP32"]): pass', "what outputs"),
        ('from penstock import Tensor\nTensor["FP31"]', "a Tensor cannot hold 'FP31'"),
        ('from penstock import Tensor\nTensor["FP32", -2]', r"cannot have the shape \[-2\]"),
        (SIMPLE + "\n@penstock.model\ndef g(): pass", "marks 2 functions"),
    ],
)
def test_forms_that_say_too_little_are_refused(processes: Processes, source: str, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        processes.load(source, {}, head="")


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
