from __future__ import annotations

import signal

import pytest

from penstock.cli.interrupts import finishing_early, terminating_cleanly
from penstock.offline.deadline import BuildDeadline


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_interrupt_ends_the_budget_and_the_second_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    deadline = BuildDeadline()
    deadline.has_result = True
    with finishing_early(deadline):
        interrupt()
        assert deadline.interrupted
        assert "press Ctrl-C again" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_any_measurement_ends_the_command() -> None:
    deadline = BuildDeadline()
    with pytest.raises(KeyboardInterrupt), finishing_early(deadline):
        interrupt()
    assert not deadline.interrupted


def test_the_handler_of_a_program_stays() -> None:
    found = []
    usual = signal.signal(signal.SIGINT, lambda *_: found.append(1))
    try:
        with finishing_early(BuildDeadline()):
            interrupt()
    finally:
        signal.signal(signal.SIGINT, usual)
    assert found == [1]


def test_a_termination_is_an_interrupt_within_the_block_only() -> None:
    with pytest.raises(KeyboardInterrupt), terminating_cleanly():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_handler_of_a_program_for_termination_stays() -> None:
    found = []
    usual = signal.signal(signal.SIGTERM, lambda *_: found.append(1))
    try:
        with terminating_cleanly():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert found == [1]
