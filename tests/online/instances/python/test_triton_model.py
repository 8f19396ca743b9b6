"""Faulty ``TritonPythonModel`` classes, in real processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.online.instances.python.process import PythonProcess
from penstock.request import InferRequest
from python_models import IDENTITY, Answers, Processes, ask, config, decoupled, failure, request


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.end()


WRONG = {
    "no list": ("return None", "expected a list in the execute return, found type 'NoneType'"),
    "too few": ("return []", r"InferenceRequest\(s\) size is:1, and InferenceResponse\(s\) size is:0"),
    "None": ("return [None]", "Expected an 'InferenceResponse' object in the execute function return list"),
    "another type": ("return [1]", "found type 'int'"),
    "no output": ("return [pb_utils.InferenceResponse([])]", "did not return the output 'y'"),
    "another output": ('return [answer("z", x)]', "returned the output 'z', which is not in its configuration"),
    "no dtype of ours": ('return [answer("y", x.astype(complex))]', "output 'y' has the unsupported dtype complex128"),
    "objects": ('return [answer("y", x.astype(object))]', "output 'y' contains a float, must contain bytes or text"),
    "too large": ('return [answer("y", np.broadcast_to(np.float32(0), (1, 1 << 40)))]', "tensors of .* bytes exceed"),
    "an exception": ("raise ValueError('bad value')", "message: ValueError: bad value$"),
    "several lines": ("raise ValueError('first\\nsecond')", "message: ValueError: first second$"),
    "a note": ("e = ValueError('bad'); e.add_note('more'); raise e", "message: ValueError: bad$"),
    "bad syntax": ("eval('1 +')", "message: SyntaxError: invalid syntax$"),
    "no rows": ("return [answer('y', x[:0])]", r"output 'y' has shape \[0, 2\] for a request with a batch of 1"),
    "more rows": ("return [answer('y', x.repeat(2, 0))]", r"output 'y' has shape \[2, 2\] for a request with"),
    "no dimension": ("return [answer('y', x[0, 0:1].reshape(()))]", r"output 'y' has shape \[\] for a request with"),
    "an exit": ("raise SystemExit(3)", "message: SystemExit: 3$"),
    "an interrupt": ("raise KeyboardInterrupt", "message: KeyboardInterrupt$"),
    "a cancelled task": ("import asyncio; raise asyncio.CancelledError('gone')", "message: .*CancelledError: gone$"),
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
"""A model that runs the code in its request."""


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


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return [1]", "a decoupled model's 'execute' must return None"),
        ("return None", "dropped its response sender before the final flag"),
        ("s = requests[0].get_response_sender(); return None", "dropped its response sender before the final flag"),
        ("raise KeyboardInterrupt", "message: KeyboardInterrupt"),
        ("raise ValueError('no')", "ValueError: no"),
        ("requests[0].get_response_sender().send()", "the final flag must be set"),
        ("requests[0].get_response_sender().send(1)", "expected an InferenceResponse, got int"),
    ],
)
def test_mistakes_of_a_decoupled_model_end_the_request(coded_stream: PythonProcess, code: str, message: str) -> None:
    answers = Answers()
    try:
        coded_stream.execute([code_request(code)], answers)
    except PenstockError as error:
        answers(0, error, True)
    assert message in str(answers.all()[0])


def test_the_datatype_of_an_output_is_the_model_s_own_affair(coded: PythonProcess) -> None:
    (outcome,) = ask(coded, [code_request('return [answer("y", x.astype(np.int8))]')])
    assert outcome["y"].dtype == np.int8


LIVES = [
    "import sys; sys.stdout = sys.stderr = None; print('lost')",
    "print('x' * 100_000)",
    "import signal; signal.signal(signal.SIGTERM, lambda *_: None)",
    "import os; os.chdir('/')",
    "import subprocess; subprocess.run(['true'], check=True)",
    "import multiprocessing; multiprocessing.get_context('fork').Process(target=print).start()",
    "import os; os.fork() or os._exit(0); os.wait()",
    "import threading; threading.Thread(target=lambda: 1 / 0).start()",
    "import gc; gc.disable()",
]


@pytest.mark.parametrize("code", LIVES)
@pytest.mark.filterwarnings("ignore")
def test_what_a_model_does_to_its_process_does_not_keep_it_from_answering(coded: PythonProcess, code: str) -> None:
    (outcome,) = ask(coded, [code_request(f"{code}; return [answer('y', x)]")])
    assert outcome["y"].tolist() == [[5, 5]]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("pb_utils.MetricFamily('nv_a', '', 'gauge')", "not a valid metric name"),
        ("pb_utils.MetricFamily('a', '', 'histogram')", "must be a COUNTER or a GAUGE"),
        ("pb_utils.MetricFamily('a', '', 'gauge').Metric({'-': ''})", "not a valid label name"),
        ("pb_utils.MetricFamily('a', '', 'gauge').Metric().set(float('nan'))", "cannot become nan"),
        ("pb_utils.MetricFamily('b', '', 'counter').Metric().set(1)", "cannot be set"),
        ("pb_utils.MetricFamily('b', '', 'counter').Metric().increment(-1)", "cannot be incremented by -1"),
    ],
)
def test_metrics_that_cannot_be_are_refused(coded: PythonProcess, code: str, message: str) -> None:
    assert message in failure(coded, [code_request(code)])


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
        (IDENTITY, {}, "inputs and outputs are unknown"),
        (COMPLETES + IDENTITY, config(32), "'max_batch_size' is 32, above the model's 16"),
        (COMPLETES.replace("return config", "return None") + IDENTITY, {}, "did not return its argument"),
        (
            "def initialize(self, args):\n    1 / 0" + IDENTITY,
            None,
            r"failed in line 8 .*ZeroDivisionError: division by",
        ),
        ("import absent_module" + IDENTITY, None, r"failed in line 7 while it was imported: ModuleNotFoundError"),
        ("def execute(self: pass", None, "not valid Python: line 7: "),
        ("import os; os._exit(3)" + IDENTITY, None, "ended with exit status 3 while it loaded the model"),
        ("import os; os.abort()" + IDENTITY, None, "ended with signal SIGABRT while it loaded the model"),
        ("x = '\0'" + IDENTITY, None, "model.py contains null bytes"),
        (IDENTITY, config(parameters={"EXECUTION_ENV_PATH": {"string_value": "e"}}), "'EXECUTION_ENV_PATH' is not"),
    ],
)
def test_what_cannot_be_loaded_is_told(processes: Processes, body: str, options: Any, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        processes.load(body, options)
