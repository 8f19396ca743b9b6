"""The effect of 16 attackers on innocent clients, which send 500 small requests per second over HTTP and 500 over gRPC and compare
each answer bit for bit. Server, clients and attackers are processes that share all cores. The attackers have a niceness of 10, so
that the server's behaviour is measured rather than the competition for the cores. There are three kinds of rounds, in turn: quiet,
attack and control. In a control round, the attackers attack a second server on the same cores, which shows the cost of sharing the
cores. p99 is the p99 of the slower protocol. It must be at most 3 times the p99 of quiet rounds, and at most 100 ms. Memory is the
increase of the resident set compared with the time before the attack: the peak, which the kernel records, and the remaining
increase 10 seconds after the attack. With "unknown", the server requires keys and the attackers have no key.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.attacks.catalog import ATTACKS, EXPENSIVE
from benchmarks.attacks.process import ATTACKERS, Outcome, attacking
from benchmarks.attacks.targets import KEY, targets
from benchmarks.innocents import InnocentsProcess, Round, innocents
from benchmarks.results import Row, claim, skipped
from benchmarks.servers import Server

_PLANS = {True: (1, 2.0), False: (3, 5.0)}
"""Number of rounds and seconds per round, for quick runs (True) and full runs (False)."""
_RATIO = 3.0
_LONGEST_MS = 100.0
_MEMORY_MIB = 128.0
_MEMORY_UNKNOWN_MIB = 8.0
_LEFT_MIB = 16.0
_LEFT_SHARE = 0.1
_LEFT_AFTER_S = 10.0
_POLL_S = 0.1
_MARGIN_S = 0.7  # for the clients' warm-up and their last answers
_FLAGS = {"reload": ("--model-control-mode", "explicit", "--load-model", "*")}
_UNKNOWN = " unknown"


class Siege(msgspec.Struct, frozen=True):
    """One attack, and its quiet and control rounds. Memory is the increase in bytes compared with the time before the attack."""

    quiet: Round
    attack: Round
    control: Round
    outcome: Outcome
    cpu_s: tuple[float, float]
    """CPU seconds of the server, and of the attackers, during the attack."""
    peak: int
    left: int
    """The increase ``_LEFT_AFTER_S`` seconds after the attack, or earlier if it is within the limit by then."""
    back_s: float


def run(quick: bool) -> list[Row]:
    """Return the rows of all parts. A part that fails has one row, with the error."""
    rows: list[Row] = []
    for name, part in PARTS.items():
        try:
            rows += part(quick)
        except (RuntimeError, OSError) as error:
            rows.append(skipped(name, error))
    return rows


def part(name: str, quick: bool, *, unknown: bool = False, plan: tuple[int, float] | None = None) -> list[Row]:
    """The rows of one attack. ``plan`` replaces the number of rounds, and the seconds per round, that ``quick`` implies."""
    rounds, seconds = plan or _PLANS[quick]
    with (
        tempfile.TemporaryDirectory() as folder,
        targets(Path(folder), 2, *_FLAGS.get(name, ()), keys=unknown) as (server, other),
        innocents(server, KEY if unknown else "") as clients,
    ):
        clients.round(seconds)  # let the server allocate the memory that it needs for normal work
        before = server.rss_bytes()
        sieges = [besiege(name, server, other, clients, seconds, before) for _ in range(rounds)]
        last = clients.round(seconds)
    return rows_of(name + _UNKNOWN * unknown, sieges, last, before, _MEMORY_UNKNOWN_MIB if unknown else _MEMORY_MIB)


def besiege(name: str, server: Server, other: Server, clients: InnocentsProcess, seconds: float, before: int) -> Siege:
    """Run a quiet round, an attack and a control round."""
    quiet = clients.round(seconds)
    reset_peak(server)
    used = server.cpu_seconds()
    attack, outcome = _under_attack(name, server, clients, seconds)
    used = server.cpu_seconds() - used
    back_s, left = await_memory(server, before)
    peak = peak_bytes(server) - before  # read after the wait, because requests may still be processed during it
    control, _ = _under_attack(name, other, clients, seconds)
    return Siege(quiet, attack, control, outcome, (used, outcome.cpu_s), peak, left, back_s)


def _under_attack(name: str, server: Server, clients: InnocentsProcess, seconds: float) -> tuple[Round, Outcome]:
    with attacking(name, server, seconds + _MARGIN_S) as attackers:
        clients.begin(seconds)
        outcome = attackers.finish(seconds)
        return clients.finish(), outcome


def reset_peak(server: Server) -> None:
    """Reset the peak memory that the kernel records for each process."""
    for pid in server.processes():
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(server: Server) -> int:
    """The sum of the peak memory of the server's processes since ``reset_peak``."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in server.processes()]
    return sum(int(text.partition("VmHWM:")[2].split()[0]) for text in texts) * 1024


def await_memory(server: Server, before: int) -> tuple[float, int]:
    """Wait up to ten seconds until the memory is close to ``before``. Returns the seconds that this took, and the remaining
    increase in bytes.
    """
    start = time.monotonic()
    while True:
        left = server.rss_bytes() - before
        waited = time.monotonic() - start
        if left <= _allowed(before) or waited >= _LEFT_AFTER_S:
            return waited, left
        time.sleep(_POLL_S)


def _allowed(before: int) -> float:
    return max(_LEFT_MIB * 2**20, _LEFT_SHARE * before)


def rows_of(name: str, sieges: list[Siege], last: Round, before: int, memory_mib: float) -> list[Row]:
    """The rows for latency, memory, and correctness."""
    calm = [*(siege.quiet for siege in sieges), last]
    quiet, attack, control = (
        statistics.median(one.p99_ms for one in rounds)
        for rounds in (calm, [siege.attack for siege in sieges], [siege.control for siege in sieges])
    )
    worst = max(siege.attack.max_ms for siege in sieges)
    count = sum(siege.attack.requests for siege in sieges)
    server, attackers = (sum(siege.cpu_s[side] for siege in sieges) for side in (0, 1))
    latency = (
        f"{attack / quiet:.3g}× quiet ({quiet:.3g} ms), control {control:.3g} ms, longest {worst:,.0f} ms, {count:,} requests; "
        f"CPU: server {server:.1f} s, {ATTACKERS} attackers {attackers:.1f} s; {sieges[-1].outcome}"
    )
    failed = [
        f"{number} {kind}" for one in [siege.attack for siege in sieges] + calm for kind, number in one.failed.items()
    ]
    rounds = [one for siege in sieges for one in (siege.quiet, siege.attack, siege.control)] + [last]
    peak, left = max(siege.peak for siege in sieges) / 2**20, max(siege.left for siege in sieges) / 2**20
    back = f"of {before / 2**20:.0f} MiB; back in {max(siege.back_s for siege in sieges):.1f} s"
    return [
        claim(f"{name}, p99", attack, "ms", "<=", min(_LONGEST_MS, _RATIO * quiet), note=latency),
        claim(f"{name}, memory", max(peak, 0.0), "MiB", "<=", memory_mib, note=back),
        claim(f"{name}, memory left", max(left, 0.0), "MiB", "<=", _allowed(before) / 2**20),
        claim(
            f"{name}, lost or wrong",
            sum(sum(one.failed.values()) for one in rounds),
            "",
            "<=",
            0,
            note=", ".join(failed),
        ),
    ]


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    **{name: partial(part, name) for name in ATTACKS},
    **{f"{name}{_UNKNOWN}".replace(" ", "-"): partial(part, name, unknown=True) for name in EXPENSIVE},
}
