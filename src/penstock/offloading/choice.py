"""Decides where a call runs. Pure functions of what is known before the call."""

from __future__ import annotations

import enum

import msgspec

_PATIENCE = 2.0
"""A server is late after this multiple of its predicted time."""
_SLACK_S = 0.005
_PROBE_SHARE = 0.05
"""Largest share of the time that the other side may be busy with probes."""
_FIRST, _FEW, _SHARE_OF_FEW = 4, 16, 0.25
"""The first calls of a side are run as soon as possible. While few are known, probes may take a larger share of the time."""
_RETRY_S, _MAX_RETRY_S = 0.5, 30.0


class Side(enum.Enum):
    """Where a call runs."""

    DEVICE = "device"
    SERVER = "server"


class Outlook(msgspec.Struct, frozen=True):
    """What is known before a call. Times are in seconds; None means unknown."""

    device_s: float | None
    server_s: float | None
    has_server: bool
    """False while the server is unreachable or is not to be used."""
    deadline_s: float | None = None
    spare_device: bool = False
    """True if the battery or the memory of the device is low."""


class Plan(msgspec.Struct, frozen=True):
    """Where a call runs first, and after how many seconds without an answer the device starts as well."""

    first: Side
    device_after_s: float = 0.0


def choose(outlook: Outlook) -> Plan:
    """The side with the smaller predicted time; the server, if the device is to be spared and the server meets the deadline.

    If the server is late, the device starts as well: when it still can meet the deadline, and at the latest after twice the server's
    predicted time. An unknown side is never waited for.
    """
    device, server, deadline = outlook.device_s, outlook.server_s, outlook.deadline_s
    if not outlook.has_server or server is None:
        return Plan(Side.DEVICE)
    meets = deadline is None or server <= deadline
    if outlook.spare_device:
        if not meets and (device is not None and device < server):
            return Plan(Side.DEVICE)
    elif device is None or device <= server:
        return Plan(Side.DEVICE)
    patience = latest_s(server)
    if deadline is not None and device is not None:
        patience = min(patience, max(0.0, deadline - device))
    return Plan(Side.SERVER, patience)


def latest_s(server_s: float) -> float:
    """Seconds after which a server with this predicted time is late."""
    return _PATIENCE * server_s + _SLACK_S


def probe_due(since_s: float, newest_s: float | None, calls: int) -> bool:
    """True if the side that does not answer should run the call as well, ``since_s`` seconds after it last ran one.

    ``newest_s`` is the time of its newest call, so that a link that has become faster is measured again soon; None before the first
    call. ``calls`` is the number of its calls since its time last changed. Probes never delay an answer. They take about 5 % of the
    time, and 25 % while fewer than 16 calls are known: one lost packet among so few would decide the side for long.
    """
    if newest_s is None or calls < _FIRST:
        return True
    return since_s >= newest_s / (_SHARE_OF_FEW if calls < _FEW else _PROBE_SHARE)


def retry_after(failures: int) -> float:
    """Seconds without calls to the server after ``failures`` failures in a row (>= 1)."""
    return float(min(_MAX_RETRY_S, _RETRY_S * 2 ** min(failures - 1, 16)))
