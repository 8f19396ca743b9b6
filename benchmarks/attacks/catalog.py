"""All attacks by name."""

from __future__ import annotations

from benchmarks.attacks.bombs import BOMBS
from benchmarks.attacks.floods import FLOODS
from benchmarks.attacks.resets import RESETS
from benchmarks.attacks.slow import SLOW
from benchmarks.attacks.unread import UNREAD

ATTACKS = {**BOMBS, **FLOODS, **UNREAD, **SLOW, **RESETS}
EXPENSIVE = (
    "gzip-tensor",
    "gzip-json",
    "gzip-message",
    "json",
    "typed-contents",
    "generate",
    "logging",
    "empty-messages",
)
"""Attacks that are also run against a server with a keys file, by attackers without a key."""
