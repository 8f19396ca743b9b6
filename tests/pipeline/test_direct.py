"""A single call without queues gives the same as a stream, for random functions."""

from __future__ import annotations

import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.pipeline.direct import Direct
from penstock.pipeline.function import Function
from penstock.pipeline.streaming.stages import Stages
from pipelines import FEATURES, LOCAL, function
from random_functions import MODELS, expected, functions, number


@given(functions(), st.integers(0, 999))
def test_a_direct_call_gives_the_same_as_a_stream(one: Function, value: int) -> None:
    should = expected(one, number(value))
    (streamed,) = Stages(one, MODELS).stream([{"x": number(value)}], threads=0)
    direct = Direct(one, MODELS)
    if should is None:
        assert isinstance(streamed, PenstockError)
        with pytest.raises(PenstockError, match=re.escape(streamed.message)):
            direct.call({"x": number(value)})
        return
    found = direct.call({"x": number(value)})
    assert {name: int(array[0]) for name, array in found.items()} == should


def test_steps_that_the_outputs_do_not_need_are_left_out() -> None:
    assert Direct(function(), LOCAL, ("p",)).call({"features": FEATURES}).keys() == {"p"}


def test_several_threads_may_call() -> None:
    direct, found = Direct(function(), LOCAL), []
    calls = [
        threading.Thread(target=lambda: found.append(direct.call({"features": FEATURES})["label"])) for _ in range(8)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert found == [found[0]] * 8
