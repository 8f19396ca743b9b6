"""Where a call runs."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.offloading.choice import Outlook, Side, choose, probe_due, retry_after

_TIMES = st.floats(1e-4, 10)
_KNOWN = st.none() | _TIMES


@given(_TIMES, _TIMES)
def test_the_earlier_side_runs(device: float, server: float) -> None:
    plan = choose(Outlook(device, server, has_server=True))
    assert plan.first is (Side.SERVER if server < device else Side.DEVICE)


@given(_KNOWN, _KNOWN, _KNOWN, st.booleans())
def test_without_a_server_the_device_runs(
    device: float | None, server: float | None, deadline: float | None, spare: bool
) -> None:
    assert choose(Outlook(device, server, False, deadline, spare)).first is Side.DEVICE


@given(_KNOWN, _KNOWN, st.booleans())
def test_a_side_that_was_never_measured_is_not_waited_for(
    device: float | None, deadline: float | None, spare: bool
) -> None:
    assert choose(Outlook(device, None, True, deadline, spare)).first is Side.DEVICE


@given(_TIMES, _TIMES, _TIMES)
def test_the_device_starts_in_time_for_the_deadline(device: float, server: float, deadline: float) -> None:
    plan = choose(Outlook(device, server, True, deadline, spare_device=True))
    if plan.first is Side.SERVER:
        assert plan.device_after_s <= max(0.0, deadline - device)
        assert server <= max(deadline, device)


def test_a_spared_device_leaves_slow_calls_to_the_server() -> None:
    assert choose(Outlook(0.01, 0.5, True, None, spare_device=True)).first is Side.SERVER
    assert choose(Outlook(0.01, 0.5, True, 0.1, spare_device=True)).first is Side.DEVICE


@given(_TIMES, _TIMES, st.sampled_from([(4, 0.25), (15, 0.25), (16, 0.05), (63, 0.05)]))
def test_probes_take_a_share_of_the_time(cost: float, since: float, known: tuple[int, float]) -> None:
    calls, share = known
    assert probe_due(since, cost, calls) == (cost <= share * since) or abs(cost - share * since) < 1e-12


@given(_TIMES, _TIMES, st.integers(1, 3))
def test_the_first_calls_of_a_side_do_not_wait(cost: float, since: float, calls: int) -> None:
    assert probe_due(since, cost, calls)
    assert probe_due(since, None, 0)


def test_an_unreachable_server_is_asked_less_and_less() -> None:
    waits = [retry_after(failures) for failures in (1, 2, 3, 100)]
    assert waits == sorted(waits)
    assert waits[0] == 0.5
    assert waits[-1] == 30
