"""The target of an attack, and the counts of what attackers sent and received."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from penstock.perf.http_client import Address

_REST_S = 0.01
_BEGIN_S = 60.0


class Site:
    """The attacked server: its addresses, the attackers' key, if any, and the total counts of all attackers."""

    def __init__(self, http: Address, grpc: Address, key: str = "") -> None:
        """Raises ValueError unless both addresses are loopback addresses."""
        for address in (http, grpc):
            if not ipaddress.ip_address(address.host).is_loopback:
                raise ValueError(
                    f"{address.authority} is not a loopback address; attacks are for servers on this machine"
                )
        self.http = http
        self.grpc = grpc
        self.key = key
        self.counts: Counter[str] = Counter()
        self.begun = asyncio.Event()
        """Set when an attacker has sent its first bytes."""

    def count(self, what: str, number: int = 1) -> None:
        """Add ``number`` to the count of the event ``what``."""
        self.counts[what] += number


class Attack(msgspec.Struct, frozen=True):
    """One kind of attack. ``run`` attacks over one connection. Attackers repeat it."""

    about: str
    run: Callable[[Site], Awaitable[None]]


async def repeat(attack: Attack, site: Site) -> None:
    """Attack forever. After the server has ended a connection, continue with a new connection."""
    while True:
        try:
            await attack.run(site)
        except (OSError, EOFError):
            site.count("connections ended by the server")
        await asyncio.sleep(_REST_S)


async def besiege(attack: Attack, site: Site, attackers: int, seconds: float) -> None:
    """Run ``attackers`` attackers at the same time. The attack lasts ``seconds``, counted from the first bytes sent. Raises the
    exceptions of the attack.
    """
    begun = asyncio.create_task(site.begun.wait())
    tasks = [asyncio.create_task(repeat(attack, site)) for _ in range(attackers)]
    try:
        await asyncio.wait((begun, *tasks), timeout=_BEGIN_S, return_when=asyncio.FIRST_COMPLETED)
        failed, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in failed:
            task.result()
    finally:
        for task in (begun, *tasks):
            task.cancel()
        await asyncio.gather(begun, *tasks, return_exceptions=True)
