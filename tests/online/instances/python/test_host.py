from __future__ import annotations

import logging
import threading

import pytest

from penstock.errors import Unavailable, Unsupported
from penstock.online.instances.process_channel import MetricChanged
from penstock.online.instances.python.host import Here, Host, StageTimes
from penstock.request import InferRequest, Outcome


class Server(Host):
    """Records requests and never answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def call(self, request: InferRequest, done: object, decoupled: bool) -> object:
        self.asked.append(request.model_name)
        return lambda: None


def nobody_answers(outcome: Outcome) -> None:
    raise AssertionError(outcome)


def test_without_a_server_other_models_cannot_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    with pytest.raises(Unsupported, match="model 'other'"):
        host.call(InferRequest("other", {}), nobody_answers, False)
    host.measure(MetricChanged("m", "counter", "", {}, 1.0, False))
    host.later(lambda: pytest.fail("there is no other thread"))
    with caplog.at_level(logging.INFO):
        host.say(logging.INFO, "100 % sure")
    assert "100 % sure" in caplog.text


def test_a_question_to_itself_is_refused_on_the_thread_that_would_have_to_answer_it() -> None:
    here = Here()
    server = Server()
    here.host, here.name = server, "m"
    here.ask(InferRequest("m", {}), nobody_answers, False)
    here.waits_for_itself = True
    refused: list[Outcome] = []
    here.ask(InferRequest("m", {}), refused.append, False)()
    here.ask(InferRequest("other", {}), nobody_answers, False)
    thread = threading.Thread(target=here.ask, args=(InferRequest("m", {}), nobody_answers, False))
    thread.start()
    thread.join()
    assert server.asked == ["m", "other", "m"]
    (error,) = refused
    assert isinstance(error, Unavailable)
    assert "would wait for itself" in error.message


def test_stages_count_until_they_are_taken_even_if_they_fail() -> None:
    stages = StageTimes()
    for _ in range(3):
        with stages.stage("read"):
            pass
    with pytest.raises(ValueError, match="x"), stages.stage("run"):
        raise ValueError("x")
    taken = stages.take()
    assert {name: count for name, (count, _) in taken.items()} == {"read": 3, "run": 1}
    assert all(total_ns >= 0 for _, total_ns in taken.values())
    assert stages.take() == {}
